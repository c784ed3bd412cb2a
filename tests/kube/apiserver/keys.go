package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// keys are paths below the directory "keys".
type keys struct {
	authority, serverCertificate, serverKey, accountKey, tokens string
}

type signer struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// makeKeys makes what is missing: an authority (ca.crt), the server's certificate, a client certificate of the
// administrator (admin.crt, admin.key; group system:masters), the key of service accounts, and a bearer token of the
// administrator (admin.token, listed in tokens.csv, where a test may add lines before a start).
func makeKeys(dir string) (keys, error) {
	at := func(name string) string { return filepath.Join(dir, "keys", name) }
	all := keys{at("ca.crt"), at("server.crt"), at("server.key"), at("accounts.key"), at("tokens.csv")}
	if _, err := os.Stat(at("complete")); err == nil {
		return all, nil
	}
	if err := os.MkdirAll(filepath.Join(dir, "keys"), 0o700); err != nil {
		return all, err
	}
	authority, err := issue(nil, "authority", nil, at("ca"))
	if err == nil {
		_, err = issue(authority, "kube-apiserver", nil, at("server"))
	}
	if err == nil {
		_, err = issue(authority, "admin", []string{"system:masters"}, at("admin"))
	}
	if err == nil {
		_, err = newKey(at("accounts.key"))
	}
	if err != nil {
		return all, err
	}
	random := make([]byte, 16)
	if _, err := rand.Read(random); err != nil {
		return all, err
	}
	token := hex.EncodeToString(random)
	if err := os.WriteFile(at("admin.token"), []byte(token), 0o600); err != nil {
		return all, err
	}
	if err := os.WriteFile(all.tokens, []byte(token+",admin,admin,system:masters\n"), 0o600); err != nil {
		return all, err
	}
	return all, os.WriteFile(at("complete"), nil, 0o600)
}

func newKey(path string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(path, "EC PRIVATE KEY", der)
}

// issue writes path.crt and path.key; without an issuer, of an authority.
func issue(issuer *signer, name string, groups []string, path string) (*signer, error) {
	key, err := newKey(path + ".key")
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: name, Organization: groups},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:     []string{"localhost", "kubernetes.default.svc"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	if issuer == nil {
		template.IsCA, template.BasicConstraintsValid = true, true
		template.KeyUsage |= x509.KeyUsageCertSign
		template.ExtKeyUsage, template.DNSNames, template.IPAddresses = nil, nil, nil
		issuer = &signer{template, key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer.certificate, &key.PublicKey, issuer.key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &signer{certificate, key}, writePEM(path+".crt", "CERTIFICATE", der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
