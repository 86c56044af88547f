// Command coredns is CoreDNS with the plugins a cluster of this harness uses and no others.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

func main() {
	// The order is the order in which a query meets the plugins.
	dnsserver.Directives = []string{"errors", "health", "ready", "cache", "kubernetes", "template", "loop"}
	coremain.Run()
}
