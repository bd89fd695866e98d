"""A server whose certificate is not accepted is an error that says why, and a CA can be named."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from semantic_fleet.objects.objects import Objects, UnavailableError

pytestmark = pytest.mark.process

_HERE = x509.IPAddress(ip_address("127.0.0.1"))
_CA = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a CA of our own")])


def _issue(folder: Path, name: x509.GeneralName, begins: int) -> None:
    """A CA, and a certificate of it for a day that begins in so many."""
    ca, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    start = datetime.now(UTC) - timedelta(hours=1) + timedelta(days=begins)
    always = start - timedelta(days=9), start + timedelta(days=9)
    builder = x509.CertificateBuilder().issuer_name(_CA)
    root = (
        builder.subject_name(_CA)
        .public_key(ca.public_key())
        .serial_number(1)
        .not_valid_before(always[0])
        .not_valid_after(always[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca, SHA256())
    )
    leaf = (
        builder.subject_name(x509.Name([]))
        .public_key(own.public_key())
        .serial_number(2)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([name]), critical=True)
        .sign(ca, SHA256())
    )
    (folder / "ca.pem").write_bytes(root.public_bytes(Encoding.PEM))
    key = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.pem").write_bytes(leaf.public_bytes(Encoding.PEM) + key)


class _Empty(BaseHTTPRequestHandler):
    """Has no object."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _Quiet(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that refuses the certificate is none."""


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    server = _Quiet(("127.0.0.1", 0), _Empty)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("name", "begins", "is_known", "reason"),
    [
        (_HERE, 0, True, None),
        (_HERE, 0, False, "unknown CA, SSL_CERT_FILE"),
        (x509.DNSName("elsewhere"), 0, True, "is for another name"),
        (_HERE, -3, True, "has expired"),
        (_HERE, 3, True, "is not valid yet"),
    ],
)
def test_what_is_wrong_with_a_certificate_is_said(
    name: x509.GeneralName, begins: int, is_known: bool, reason: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _issue(tmp_path, name, begins)
    if is_known:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    else:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with _serving(tmp_path) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(variable, "any")
        objects = Objects.open("s3://bucket/prefix")
        if reason is None:
            assert objects.size("absent") is None
        else:
            with pytest.raises(UnavailableError, match=reason):
                objects.size("absent")
