package main

import (
	"context"
	"errors"
	"net"
	"path/filepath"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// serve runs a kube-apiserver with RBAC on the listener until ctx ends. Later arguments win over the built-in ones.
func serve(ctx context.Context, listener net.Listener, dir, etcd string, arguments []string) error {
	keys, err := makeKeys(dir)
	if err != nil {
		return err
	}
	server := options.NewServerRunOptions()
	flags := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	for _, section := range server.Flags().FlagSets {
		flags.AddFlagSet(section)
	}
	if err := flags.Parse(append(builtIn(keys, dir, etcd), arguments...)); err != nil {
		return err
	}
	if err := server.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return err
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	server.SecureServing.Listener = listener
	server.SecureServing.BindPort = listener.Addr().(*net.TCPAddr).Port
	completed, err := server.Complete(ctx)
	if err != nil {
		return err
	}
	if problems := completed.Validate(); len(problems) != 0 {
		return errors.Join(problems...)
	}
	return app.Run(ctx, completed)
}

func builtIn(keys keys, dir, etcd string) []string {
	return []string{
		"--etcd-servers=" + etcd,
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/24",
		"--authorization-mode=RBAC",
		"--anonymous-auth=true",
		// Without controllers no namespace gets its default account, which this plugin waits for.
		"--disable-admission-plugins=ServiceAccount",
		"--cert-dir=" + filepath.Join(dir, "unused"),
		"--tls-cert-file=" + keys.serverCertificate,
		"--tls-private-key-file=" + keys.serverKey,
		"--client-ca-file=" + keys.authority,
		"--token-auth-file=" + keys.tokens,
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + keys.accountKey,
		"--service-account-signing-key-file=" + keys.accountKey,
		"--allow-privileged=true",
		"--shutdown-watch-termination-grace-period=1s",
	}
}
