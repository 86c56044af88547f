// Command pods is what the harness runs inside its pods.
//
//	pods pause                holds a pod's namespaces until it is told to stop
//	pods web [ADDRESS]        answers HTTP: / names the pod, /lookup?name= resolves a name from
//	                          inside the pod, /get?url= fetches an address from inside the pod
//
// Kubernetes' pause image and a web server's would come from a registry; none is needed here.
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	switch os.Args[1] {
	case "pause":
		pause()
	case "web":
		address := ":8080"
		if len(os.Args) > 2 {
			address = os.Args[2]
		}
		web(address)
	default:
		usage()
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: pods pause | pods web [ADDRESS]")
	os.Exit(2)
}

// pause waits for a signal to stop, and reaps: it is process 1 where containers share its namespace.
func pause() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}

func web(address string) {
	hostname, err := os.Hostname()
	if err != nil {
		fail(err)
	}
	client := &http.Client{Timeout: 5 * time.Second}
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, hostname)
	})
	http.HandleFunc("/lookup", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
		defer cancel()
		addresses, err := net.DefaultResolver.LookupHost(ctx, r.FormValue("name"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		fmt.Fprintln(w, strings.Join(addresses, " "))
	})
	http.HandleFunc("/get", func(w http.ResponseWriter, r *http.Request) {
		response, err := client.Get(r.FormValue("url"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer response.Body.Close()
		w.WriteHeader(response.StatusCode)
		_, _ = io.Copy(w, response.Body)
	})
	// A pod asked to go answers nothing more, so that its Service moves on at once.
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-stop
		os.Exit(0)
	}()
	fail(http.ListenAndServe(address, nil))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
