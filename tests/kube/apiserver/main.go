// A kube-apiserver and an etcd in one process, for tests on one machine.
//
// Everything lives in the directory -dir: keys and tokens are made on the first start and kept, so a restart on the
// same directory and -port is the same cluster. Standard output carries one JSON object per line (what happened),
// standard input one command per line; its end ends the process, so that no test leaves an orphan behind.
//
//	stdin    compact         throw away etcd's history up to now
//	stdout   {"event":"serving","url":"https://127.0.0.1:40000"}
//	         {"event":"compacted","revision":438}
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// A watch that a test forgot holds the API server's shutdown; nobody waits longer than this.
const patience = 5 * time.Second

func main() {
	dir := flag.String("dir", "", "directory of keys and data; a short path, etcd's socket lies in it")
	port := flag.Int("port", 0, "port on 127.0.0.1; 0 takes any free one")
	etcd := flag.String("etcd", "", "directory of another process whose etcd is used; empty: an own one")
	bare := flag.Bool("etcd-only", false, "no API server, only etcd")
	flag.Parse()
	if *dir == "" {
		fail(fmt.Errorf("-dir is missing"))
	}
	if err := run(*dir, *port, *etcd, *bare, flag.Args()); err != nil {
		fail(err)
	}
}

func run(dir string, port int, shared string, bare bool, arguments []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	store := &store{dir: shared}
	if shared == "" {
		var err error
		if store, err = startEtcd(dir); err != nil {
			return err
		}
		defer store.stop()
	}
	go obey(store, stop)
	if bare {
		say(map[string]any{"event": "serving", "url": store.url()})
		<-ctx.Done()
		return nil
	}
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	say(map[string]any{"event": "serving", "url": "https://" + listener.Addr().String()})
	go func() {
		<-ctx.Done()
		time.Sleep(patience)
		os.Exit(0)
	}()
	return serve(ctx, listener, dir, store.url(), arguments)
}

// obey reads commands until standard input ends.
func obey(store *store, stop func()) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		switch lines.Text() {
		case "compact":
			revision, err := store.compact()
			if err != nil {
				say(map[string]any{"event": "failed", "error": err.Error()})
			} else {
				say(map[string]any{"event": "compacted", "revision": revision})
			}
		default:
			say(map[string]any{"event": "failed", "error": "unknown command " + lines.Text()})
		}
	}
	stop()
}

func say(what map[string]any) {
	line, _ := json.Marshal(what)
	fmt.Println(string(line))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "kube-apiserver for tests:", err)
	os.Exit(1)
}
