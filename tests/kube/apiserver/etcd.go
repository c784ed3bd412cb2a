package main

import (
	"context"
	"errors"
	"net/url"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
)

type store struct {
	dir    string
	server *embed.Etcd
}

func startEtcd(dir string) (*store, error) {
	config := embed.NewConfig()
	config.Dir = filepath.Join(dir, "etcd")
	config.LogLevel = "error"
	config.LogOutputs = []string{filepath.Join(dir, "etcd.log")}
	config.UnsafeNoFsync = true // a test's data need not survive the machine
	config.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(dir, "etcd.sock")}}
	config.ListenPeerUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(dir, "peer.sock")}}
	// Nobody connects to these; etcd only wants them to look like host:port.
	config.AdvertiseClientUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:2379"}}
	config.AdvertisePeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:2380"}}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	server, err := embed.StartEtcd(config)
	if err != nil {
		return nil, err
	}
	select {
	case <-server.Server.ReadyNotify():
		return &store{dir: dir, server: server}, nil
	case err := <-server.Err():
		return nil, err
	case <-time.After(30 * time.Second):
		server.Close()
		return nil, errors.New("etcd did not become ready within 30 s")
	}
}

func (s *store) url() string { return "unix://" + filepath.Join(s.dir, "etcd.sock") }

func (s *store) stop() { s.server.Close() }

func (s *store) compact() (int64, error) {
	if s.server == nil {
		return 0, errors.New("this process has no etcd of its own")
	}
	revision := s.server.Server.KV().Rev()
	_, err := s.server.Server.Compact(
		context.Background(), &etcdserverpb.CompactionRequest{Revision: revision, Physical: true})
	return revision, err
}
