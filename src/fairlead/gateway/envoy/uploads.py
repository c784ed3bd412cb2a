"""How much of Envoy's memory the unfinished uploads of one client's address may hold.

No filter of Envoy counts that, so a few lines of Lua do: an upload counts with what it announces, or else with what has
come of it, until it is complete or gone. Envoy does not tell scripts of requests that are gone, but their coroutines
become garbage, so the script collects it before it refuses anybody. One that announces too much is refused at once.
Of one that announces nothing the rest is thrown away, for an answer is no longer possible then; once it ends, the route
for refused ones answers.

Each of Envoy's threads counts by itself, so each gets its part of the bytes.
"""

import os
from typing import Any

from fairlead.core.headers import OWN_NAMESPACE
from fairlead.gateway.access_log import REFUSED_UPLOAD
from fairlead.gateway.envoy.options import Options

Json = dict[str, Any]

#: Name of the filter.
BOUND = "fairlead.uploads"
WHY = "the unfinished uploads from this address hold as much as one address may: finish them first"

_LUA = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
_SOURCE = """
local unfinished = setmetatable({}, {__mode = "k"})
local held, begun, counted = {}, 0, 0

local function count()  -- again, without those that are gone
  collectgarbage()
  held, counted = {}, os.time()
  for upload in pairs(unfinished) do held[upload.client] = (held[upload.client] or 0) + upload.bytes end
end

local function take(upload, bytes)
  if (held[upload.client] or 0) + bytes > MOST and os.time() ~= counted then count() end
  local all = (held[upload.client] or 0) + bytes
  if all > MOST then return false end
  held[upload.client], upload.bytes = all, upload.bytes + bytes
  return true
end

local function refuse(handle, bytes)
  handle:streamInfo():dynamicMetadata():set(NAMESPACE, REFUSED, string.format("%d", bytes))
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local upload = {client = (headers:get("x-forwarded-for") or ""):match("[^, ]*$"), bytes = 0}
  local announced = tonumber(headers:get("content-length") or "")
  begun = begun + 1
  if begun % 4096 == 0 then count() end
  unfinished[upload] = true
  if announced and not take(upload, announced) then
    unfinished[upload] = nil
    refuse(handle, announced)
    handle:respond({[":status"] = "429"}, WHY)
    return
  end
  local received, fits = 0, true
  for chunk in handle:bodyChunks() do
    received = received + chunk:length()
    fits = fits and (announced or take(upload, chunk:length()))
    if not fits then
      refuse(handle, received)
      chunk:setBytes("")
    end
  end
  unfinished[upload] = nil
  local left = (held[upload.client] or 0) - upload.bytes
  held[upload.client] = left > 0 and left or nil
end
"""


def bound(options: Options, outside: bool) -> list[Json]:
    """The filter; none where there is no limit. `outside`: it acts only where a route says so."""
    if not options.max_heap or options.upload_share >= 1:
        return []
    threads = options.concurrency or os.cpu_count() or 1
    most = max(int(options.max_heap * options.upload_share) // threads, options.body_limit)
    values = f'local MOST, WHY, NAMESPACE, REFUSED = {most}, "{WHY}", "{OWN_NAMESPACE}", "{REFUSED_UPLOAD}"'
    typed = {"@type": _LUA, "default_source_code": {"inline_string": values + _SOURCE}}
    return [{"name": BOUND, "typed_config": typed, "disabled": outside}]
