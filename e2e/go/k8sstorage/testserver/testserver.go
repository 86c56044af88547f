// Package testserver stands in for the package of the same name in Kubernetes' storage tests: the same three
// functions, but the server is a process, the program named by BALLAST_BIN, and not an etcd linked into the test.
//
// The harness copies this file over the original in a copy of the module made when the suite runs. Every test gets
// an empty store of its own; settings travel as flags, derived from the embed.Config the tests fill in.
package testserver

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"
	"google.golang.org/grpc"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
)

// BinaryEnv names the variable that holds the path of the server under test.
const BinaryEnv = "BALLAST_BIN"

const (
	startDeadline = 60 * time.Second
	stopDeadline  = 20 * time.Second
)

// ports hands out free ports one caller at a time; it is held until the server listens on them.
var ports sync.Mutex

// NewTestConfig is a configuration with free ports and a directory that goes away with the test.
func NewTestConfig(t testing.TB) *embed.Config {
	t.Helper()
	found, err := freePorts(2)
	if err != nil {
		t.Fatal(err)
	}
	client := url.URL{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(found[0]))}
	peer := url.URL{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(found[1]))}

	cfg := embed.NewConfig()
	cfg.UnsafeNoFsync = true
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.Dir = filepath.Join(t.TempDir(), "data")
	return cfg
}

// RunEtcd starts the program under test with cfg, or with NewTestConfig when it is nil, and returns a client whose
// reads are recorded. The server is stopped when the test ends.
func RunEtcd(t testing.TB, cfg *embed.Config) *kubernetes.Client {
	t.Helper()
	if cfg == nil {
		ports.Lock()
		defer ports.Unlock()
		cfg = NewTestConfig(t)
	}
	startServer(t, cfg)

	tls, err := cfg.ClientTLSInfo.ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.New(clientv3.Config{
		TLS:         tls,
		Endpoints:   strings.Split(joinURLs(cfg.AdvertiseClientUrls), ","),
		DialTimeout: startDeadline,
		DialOptions: []grpc.DialOption{grpc.WithBlock()},
		Logger:      zaptest.NewLogger(t, zaptest.Level(zapcore.ErrorLevel)).Named("client"),
	})
	if err != nil {
		t.Fatal(err)
	}
	// A connection is not yet a leader: the first linearizable read is.
	ctx, cancel := context.WithTimeout(context.Background(), startDeadline)
	defer cancel()
	if _, err := client.KV.Get(ctx, "health"); err != nil {
		t.Fatalf("no linearizable read within %v of the start: %v", startDeadline, err)
	}
	client.KV = storagetesting.NewKVRecorder(client.KV)
	client.Kubernetes = storagetesting.NewKubernetesRecorder(client.Kubernetes)
	return client
}

func startServer(t testing.TB, cfg *embed.Config) {
	t.Helper()
	binary := os.Getenv(BinaryEnv)
	if binary == "" {
		t.Fatalf("%s is not set: it names the server under test", BinaryEnv)
	}
	var output bytes.Buffer
	server := exec.Command(binary, flags(cfg)...)
	server.Stdout, server.Stderr = &output, &output
	// A test that dies takes its server along.
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- server.Wait() }()
	t.Cleanup(func() {
		select {
		case err := <-exited:
			t.Errorf("the server ended during the test: %v\n%s", err, output.String())
			return
		default:
		}
		_ = server.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(stopDeadline):
			_ = server.Process.Kill()
			<-exited
			t.Errorf("the server did not end within %v of SIGTERM", stopDeadline)
		}
		if t.Failed() {
			t.Logf("output of the server:\n%s", output.String())
		}
	})
}

// flags are the settings of cfg that the tests use, where they differ from the defaults.
func flags(cfg *embed.Config) []string {
	standard := embed.NewConfig()
	args := []string{
		"--name=" + cfg.Name,
		"--data-dir=" + cfg.Dir,
		"--listen-client-urls=" + joinURLs(cfg.ListenClientUrls),
		"--advertise-client-urls=" + joinURLs(cfg.AdvertiseClientUrls),
		"--listen-peer-urls=" + joinURLs(cfg.ListenPeerUrls),
		"--initial-advertise-peer-urls=" + joinURLs(cfg.AdvertisePeerUrls),
		"--initial-cluster=" + cfg.InitialCluster,
	}
	add := func(differs bool, name string, value any) {
		if differs {
			args = append(args, fmt.Sprintf("--%s=%v", name, value))
		}
	}
	add(cfg.UnsafeNoFsync, "unsafe-no-fsync", true)
	add(cfg.WatchProgressNotifyInterval != standard.WatchProgressNotifyInterval,
		"watch-progress-notify-interval", cfg.WatchProgressNotifyInterval)
	add(cfg.QuotaBackendBytes != standard.QuotaBackendBytes, "quota-backend-bytes", cfg.QuotaBackendBytes)
	add(cfg.MaxTxnOps != standard.MaxTxnOps, "max-txn-ops", cfg.MaxTxnOps)
	add(cfg.MaxRequestBytes != standard.MaxRequestBytes, "max-request-bytes", cfg.MaxRequestBytes)
	add(cfg.SnapshotCount != standard.SnapshotCount, "snapshot-count", cfg.SnapshotCount)
	add(cfg.TickMs != standard.TickMs, "heartbeat-interval", cfg.TickMs)
	add(cfg.ElectionMs != standard.ElectionMs, "election-timeout", cfg.ElectionMs)

	tls := cfg.ClientTLSInfo
	add(tls.CertFile != "", "cert-file", tls.CertFile)
	add(tls.KeyFile != "", "key-file", tls.KeyFile)
	add(tls.TrustedCAFile != "", "trusted-ca-file", tls.TrustedCAFile)
	add(tls.ClientCertAuth, "client-cert-auth", true)
	return args
}

func joinURLs(urls []url.URL) string {
	texts := make([]string, 0, len(urls))
	for _, u := range urls {
		texts = append(texts, u.String())
	}
	return strings.Join(texts, ",")
}

func freePorts(count int) ([]int, error) {
	found := make([]int, 0, count)
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer listener.Close()
		found = append(found, listener.Addr().(*net.TCPAddr).Port)
	}
	return found, nil
}
