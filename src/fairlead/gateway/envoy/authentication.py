"""Who may send requests, and for which tenant: API keys and JSON Web Tokens, checked by Envoy.

Envoy checks them itself, so that they are required whether or not the scheduler runs. The tenant is passed in the
header of the fairness id, which is removed at entry. If neither a key nor a token has set it again, the last filter
refuses the request, even if an earlier filter fails.

Keys are listed in a file, one per line: the key's SHA-256, its tenant, and optionally when it expires. No filter of
Envoy compares hashes, so a few lines of Lua do. Envoy reads a new list from a file that is moved over the old one
(ECDS), without a new connection, and uses the latest list after a restart.
"""

import json
import re
import secrets
import ssl
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from fairlead.core.errors import ConfigError
from fairlead.core.headers import FAIRNESS_HEADERS
from fairlead.gateway.envoy.options import Jwt, Options, replace_watched
from fairlead.gateway.envoy.parts import Json, extension, from_file, lua, typed

if TYPE_CHECKING:
    from fairlead.config.schema import JwtSettings

#: The header with the tenant's name: removed at entry, then set by the filter that identifies the client.
TENANT = FAIRNESS_HEADERS[0]
#: The names of the filters.
KEYS, JWT, NAMED = "fairlead.keys", "envoy.filters.http.jwt_authn", "envoy.filters.http.rbac"
#: The name of the filter that sends the model servers' own token, and of its secret.
UPSTREAM = "fairlead.upstream_token"
#: The variable of an Envoy that Fairlead does not run, with the token of model servers.
UPSTREAM_VARIABLE = "FAIRLEAD_UPSTREAM_TOKEN"
#: The cluster from which the issuer's keys are fetched, and the secret with the authorities that it trusts.
JWKS, JWKS_CA = "jwks", "fairlead.jwks_ca"
#: Size limit of the keys file; enough for 10,000 keys with lines of 100 bytes.
MAX_BYTES = 1 << 20

_SECRET = "envoy.extensions.transport_sockets.tls.v3.Secret"
_DIGEST = re.compile("[0-9a-f]{64}", re.IGNORECASE)
_NAME = re.compile("[A-Za-z0-9._:@/+-]{1,128}")
_LINE = "the SHA-256 of a key in hex, a tenant, and optionally expires=2030-01-31; `fairlead key` makes such lines"


class Key(Struct, frozen=True):
    """A line of the keys file. `expires`: seconds of Unix time, 0 = never."""

    digest: str
    tenant: str
    expires: int = 0

    @property
    def line(self) -> str:
        """The line in the file."""
        until = f" expires={datetime.fromtimestamp(self.expires, UTC):%Y-%m-%dT%H:%M:%SZ}" if self.expires else ""
        return f"{self.digest} {self.tenant}{until}"


def new_key(tenant: str, expires: str | None = None) -> tuple[str, Key]:
    """(a key of 256 random bits, its entry for the file). Raises `ConfigError` for an invalid name or a time that is
    invalid or past."""
    text = f"fl-{secrets.token_urlsafe(32)}"
    key = _parse([sha256(text.encode()).hexdigest(), tenant, *([f"expires={expires}"] if expires is not None else [])])
    if 0 < key.expires <= time.time():
        raise ConfigError("this time is past", "expires")
    return text, key


def parse_keys(text: str) -> tuple[Key, ...]:
    """Parse a keys file. Raises `ConfigError` that names the line but never its content, which may be a key."""
    keys: dict[str, Key] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key = _parse(words)
            if key.digest in keys:
                raise ConfigError(
                    f"this key is listed twice, first in line {lines[key.digest]}; remove one of the lines"
                )
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error.message}", "$.gateway.keys.file") from None
        keys[key.digest], lines[key.digest] = key, number
    return tuple(keys.values())


def _parse(words: list[str]) -> Key:
    if not 2 <= len(words) <= 3 or _DIGEST.fullmatch(words[0]) is None:
        raise ConfigError(f"expected {_LINE}")
    if _NAME.fullmatch(words[1]) is None:
        raise ConfigError("a tenant's name is at most 128 letters, digits and . _ : @ / + -", "tenant")
    expires = 0
    if len(words) == 3:
        what, _, when = words[2].partition("=")
        try:
            moment = datetime.fromisoformat(when)
            expires = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).timestamp())
        except (ValueError, OverflowError):
            expires = 0
        if what != "expires" or expires <= 0:
            raise ConfigError("expected a date or a time, such as expires=2030-01-31T12:00:00Z", "expires")
    return Key(words[0].lower(), words[1], expires)


def read_keys(file: str) -> tuple[Key, ...]:
    """Read a keys file. Raises `ConfigError` if it cannot be read or is invalid."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"is larger than {MAX_BYTES >> 20} MiB")
        return parse_keys(content.decode())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", "$.gateway.keys.file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text", "$.gateway.keys.file") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", "$.gateway.keys.file") from None


def read_jwt(settings: "JwtSettings") -> Jwt:
    """Read the settings for tokens. Raises `ConfigError` if a file that they name cannot be used."""
    jwks, ca_file = "", settings.ca_file
    if settings.jwks_file:
        try:
            jwks = Path(settings.jwks_file).read_text(encoding="utf-8")
            if not json.loads(jwks)["keys"]:
                raise ValueError
        except OSError as error:
            raise ConfigError(f"cannot read it: {error.strerror}", "$.gateway.jwt.jwksFile") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError('expected a JSON Web Key Set, {"keys": [...]}', "$.gateway.jwt.jwksFile") from None
    elif not ca_file:
        ca_file = ssl.get_default_verify_paths().cafile or ""
        if not ca_file and settings.jwks_uri.startswith("https:"):
            raise ConfigError("the system has no bundle of authorities: name one", "$.gateway.jwt.caFile")
    return Jwt(
        issuer=settings.issuer,
        audiences=settings.audiences,
        jwks_uri=settings.jwks_uri,
        jwks=jwks,
        ca_file=ca_file,
        tenant_claim=settings.tenant_claim,
        forward=settings.forward,
    )


def read_authorities(file: str) -> str:
    """Read the PEM bundle for the issuer's server. Raises `ConfigError` if it cannot be used."""
    try:
        ssl.create_default_context(cafile=file)
        return Path(file).read_bytes().decode(errors="replace")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot use {file}: {error.strerror}", "$.gateway.jwt.caFile") from None


# ---- Envoy's filters ----


def upstream_token(options: Options) -> list[Json]:
    """The filter that gives model servers their own token instead of the client's; none if they require none."""
    if not (options.upstream_token_file or options.upstream_token_variable):
        return []
    file = options.upstream_token_file
    secret = followed_secret(UPSTREAM, file) if file else {"name": UPSTREAM}
    credential = extension(
        "envoy.http.injected_credentials.generic",
        "http.injected_credentials.generic.v3.Generic",
        credential=secret,
        header="authorization",
        header_value_prefix="Bearer ",
    )
    injector = "filters.http.credential_injector.v3.CredentialInjector"
    return [extension(UPSTREAM, injector, overwrite=True, credential=credential)]


def static_secrets(options: Options) -> list[Json]:
    """What the filter above reads from Envoy's environment."""
    variable = options.upstream_token_variable
    return [_secret({"environment_variable": variable})] if variable else []


def followed_secret(name: str, path: str) -> Json:
    """The reference to a secret in a file that Envoy follows."""
    return {"name": name, "sds_config": from_file(path)}


def _secret(source: Json) -> Json:
    return {"name": UPSTREAM, "generic_secret": {"secret": source}}


def authentication(options: Options) -> list[Json]:
    """The filters, in the order in which they act; none if no authentication is configured."""
    filters = []
    if options.jwt is not None:
        filters.append(_followed(_jwt(options.jwt, optional=options.asks_for_keys), options.jwt_file))
    if options.asks_for_keys:
        filters.append(_followed(lua(KEYS, options.keys_script), options.keys_file))
    if filters:
        named = {"permissions": [{"header": {"name": TENANT, "present_match": True}}], "principals": [{"any": True}]}
        rules = {"action": "ALLOW", "policies": {"named": named}}
        filters.append(extension(NAMED, "filters.http.rbac.v3.RBAC", rules=rules))
    return filters


def _jwt(jwt: Jwt, optional: bool) -> Json:
    """The filter for tokens. `optional`: a client without a valid token may use a key instead."""
    provider: Json = {
        "issuer": jwt.issuer,
        "audiences": list(jwt.audiences),
        "require_expiration": True,
        "forward": jwt.forward,
        # By default, a token in the query is accepted too, which would appear in logs.
        "from_headers": [{"name": "authorization", "value_prefix": "Bearer "}],
        "claim_to_headers": [{"header_name": TENANT, "claim_name": jwt.tenant_claim}],
    }
    if jwt.jwks_uri:
        there = {"uri": jwt.jwks_uri, "cluster": JWKS, "timeout": "5s"}
        refetch = {"failed_refetch_duration": "5s"}
        provider["remote_jwks"] = {"http_uri": there, "cache_duration": "300s", "async_fetch": refetch}
    else:
        provider["local_jwks"] = {"inline_string": jwt.jwks}
    requires: Json = {"provider_name": "issuer"}
    if optional:
        requires = {"requires_any": {"requirements": [requires, {"allow_missing_or_failed": {}}]}}
    rules = [{"match": {"prefix": "/"}, "requires": requires}]
    kind = "filters.http.jwt_authn.v3.JwtAuthentication"
    return extension(JWT, kind, providers={"issuer": provider}, rules=rules)


_SOURCE = """
local bit = require("bit")
local band, bor, xor, left, right, ror = bit.band, bit.bor, bit.bxor, bit.lshift, bit.rshift, bit.ror
local constants, first = {}, {}
local candidate = 1
while #constants < 64 do  -- FIPS 180-4, 4.2.2 and 5.3.3: from the roots of the first 64 primes
  candidate = candidate + 1
  local prime = true
  for divisor = 2, math.sqrt(candidate) do prime = prime and candidate % divisor > 0 end
  if prime then
    table.insert(constants, math.floor(candidate ^ (1 / 3) % 1 * 2 ^ 32))
    if #first < 8 then table.insert(first, math.floor(math.sqrt(candidate) % 1 * 2 ^ 32)) end
  end
end

local function sha256(text)  -- FIPS 180-4, 6.2; hex
  local size = #text
  text = text .. "\\128" .. string.rep("\\0", (55 - size) % 64 + 6)
  text = text .. string.char(math.floor(size / 32), size * 8 % 256)
  local hash, w = {unpack(first)}, {}
  for start = 1, #text, 64 do
    for i = 1, 16 do
      local p, q, r, s = text:byte(start + 4 * i - 4, start + 4 * i - 1)
      w[i] = bor(left(p, 24), left(q, 16), left(r, 8), s)
    end
    for i = 17, 64 do
      local x, y = w[i - 15], w[i - 2]
      local s0, s1 = xor(ror(x, 7), ror(x, 18), right(x, 3)), xor(ror(y, 17), ror(y, 19), right(y, 10))
      w[i] = bit.tobit(w[i - 16] + s0 + w[i - 7] + s1)
    end
    local a, b, c, d, e, f, g, h = unpack(hash)
    for i = 1, 64 do
      local choice, majority = xor(g, band(e, xor(f, g))), xor(band(a, xor(b, c)), band(b, c))
      local t1 = h + xor(ror(e, 6), ror(e, 11), ror(e, 25)) + choice + constants[i] + w[i]
      local t2 = xor(ror(a, 2), ror(a, 13), ror(a, 22)) + majority
      a, b, c, d, e, f, g, h = bit.tobit(t1 + t2), a, b, c, bit.tobit(d + t1), e, f, g
    end
    for i, word in ipairs({a, b, c, d, e, f, g, h}) do hash[i] = bit.tobit(hash[i] + word) end
  end
  for i = 1, 8 do hash[i] = bit.tohex(hash[i]) end
  return table.concat(hash)
end

local tenants, expiries = {}, {}
for digest, tenant, expires in LIST:gmatch("(%S+) (%S+) (%d+)") do
  tenants[digest], expiries[digest] = tenant, tonumber(expires)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get(TENANT) then  -- a token has named it
    if not FORWARD then headers:remove("x-api-key") end
    return
  end
  local key = (headers:get("authorization") or ""):match("^[Bb][Ee][Aa][Rr][Ee][Rr] +(%S+) *$")
  key = key or headers:get("x-api-key") or ""  -- Anthropic's clients send the latter
  local digest = #key >= 16 and #key <= 512 and sha256(key)
  local tenant = digest and tenants[digest]
  if not tenant or (expiries[digest] > 0 and expiries[digest] <= os.time()) then
    handle:respond({[":status"] = "401", ["www-authenticate"] = "Bearer"}, WHY)
    return
  end
  headers:add(TENANT, tenant)
  if not FORWARD then
    headers:remove("authorization")
    headers:remove("x-api-key")
  end
end
"""
_WHY = "this gateway asks for a valid API key: Authorization: Bearer KEY"


def script(keys: Iterable[Key], forward: bool) -> str:
    """The Lua script. `forward`: model servers get the key too."""
    listed = "\n".join(f"{key.digest} {key.tenant} {key.expires}" for key in keys)
    values = f'local LIST = [[\n{listed}\n]]\nlocal TENANT, WHY, FORWARD = "{TENANT}", "{_WHY}", {str(forward).lower()}'
    return values + _SOURCE


def _followed(filter_: Json, path: str) -> Json:
    """The filter with its content in a file that `_write` writes and Envoy follows; empty = the filter as it is."""
    if not path:
        return filter_
    types = [filter_["typed_config"]["@type"]]
    return {"name": filter_["name"], "config_discovery": {"config_source": from_file(path), "type_urls": types}}


def _write(path: Path, resource: Json) -> None:
    """Write a new version of a part of the configuration. Raises `OSError` on disk errors; the old version then stays
    in force."""
    replace_watched(path, json.dumps({"resources": [resource]}))


def _write_filter(path: Path, filter_: Json) -> None:
    _write(path, typed("envoy.config.core.v3.TypedExtensionConfig", **filter_))


def write_jwt(path: Path, jwt: Jwt, optional: bool) -> None:
    """Write the filter for tokens, for `Options.jwt_file`. `optional`: a client without a valid token may use a key
    instead. Raises `OSError` on disk errors."""
    _write_filter(path, _jwt(jwt, optional))


def write_upstream_token(path: Path, token: str) -> None:
    """Write the model servers' token, for `Options.upstream_token_file`: as a secret, which Envoy's admin page hides.
    Raises `OSError` on disk errors."""
    _write(path, typed(_SECRET, **_secret({"inline_string": token})))


def write_authorities(path: Path, pem: str) -> None:
    """Write the authorities that the issuer's server is checked by, for `Options.jwks_ca_file`. Raises `OSError` on
    disk errors."""
    _write(path, typed(_SECRET, name=JWKS_CA, validation_context={"trusted_ca": {"inline_string": pem}}))


def write_keys(path: Path, keys: Iterable[Key], forward: bool) -> None:
    """Write the filter for keys, for `Options.keys_file`. Raises `OSError` on disk errors."""
    _write_filter(path, lua(KEYS, script(keys, forward)))
