"""Certificates that are valid at a given time."""

import subprocess
from pathlib import Path


def make_pair(directory: Path, begins: str, ends: str) -> bytes:
    """Write a self-signed pair to `tls.crt` and `tls.key`; returns the certificate. The times are like
    `20260131235959Z`."""
    (directory / "ca.cnf").write_text("[ca]\ndatabase=index\nserial=serial\nnew_certs_dir=.\npolicy=any\n[any]\n")
    (directory / "index").touch()
    (directory / "serial").write_text("01\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "tls.key"]
    given = ["-keyfile", "tls.key", "-in", "request", "-out", "tls.crt", "-startdate", begins, "-enddate", ends]
    for command in (
        ["req", "-new", *key, "-subj", "/CN=x", "-out", "request"],
        ["ca", "-batch", "-config", "ca.cnf", "-name", "ca", "-selfsign", "-preserveDN", "-md", "sha256", *given],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=directory)
    return (directory / "tls.crt").read_bytes()
