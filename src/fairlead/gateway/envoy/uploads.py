"""Bounds of uploads: the memory of Envoy that those from one client address may hold, and the size of each.

No filter of Envoy counts the memory, so a few lines of Lua do. An upload counts with its announced size, or else with
the bytes received so far, until it is complete or gone. Envoy does not report lost requests to scripts, but their
coroutines become garbage, so the script collects garbage before it refuses a request. An upload that announces too much
is refused immediately. If one without an announced size becomes too large, the rest of it is discarded, because an
answer is no longer possible then. When it ends, the route for refused uploads answers.

Each of Envoy's threads counts separately, so each gets its part of the bytes.

Many clients read an answer only once they have sent the whole body, and get a reset instead of the 413 if Envoy closes
the connection before. So a second script discards what is beyond the limit, up to `DISCARDED` bytes; a route answers.
"""

import os

from fairlead.core.headers import OWN_NAMESPACE
from fairlead.gateway.access_log import REFUSED_UPLOAD
from fairlead.gateway.envoy.options import Options
from fairlead.gateway.envoy.parts import Json, lua

#: The names of the filters.
BOUND, DISCARD = "fairlead.uploads", "fairlead.discard"
#: Bytes beyond the limit for bodies that are read and discarded.
DISCARDED = 64 << 20
#: The key in the metadata of requests whose body was discarded.
TOO_LARGE = "too_large"
WHY = "the unfinished uploads from this address hold as much as one address may: finish them first"

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
    -- What is beyond the limit is discarded, and takes no memory.
    fits = fits and (announced or take(upload, math.max(math.min(received, LIMIT) - upload.bytes, 0)))
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
    """The filter; none if there is no limit. `outside`: it acts only if a route enables it."""
    if not options.max_heap or options.upload_share >= 1:
        return []
    threads = options.concurrency or os.cpu_count() or 1
    most = max(int(options.max_heap * options.upload_share) // threads, options.body_limit)
    names = f'"{WHY}", "{OWN_NAMESPACE}", "{REFUSED_UPLOAD}"'
    limit = options.body_limit if discard(options, outside) else 1 << 62
    values = f"local MOST, LIMIT, WHY, NAMESPACE, REFUSED = {most}, {limit}, {names}"
    return [{**lua(BOUND, values + _SOURCE), "disabled": outside}]


_DISCARD_SOURCE = """
function envoy_on_request(handle)
  local announced = tonumber(handle:headers():get("content-length") or "")
  if announced and announced <= LIMIT then return end
  local received = 0
  for chunk in handle:bodyChunks() do
    received = received + chunk:length()
    if announced or received > LIMIT then
      handle:streamInfo():dynamicMetadata():set(NAMESPACE, TOO_LARGE, "1")
      if received <= LIMIT + DISCARDED then chunk:setBytes("") end  -- otherwise the buffer filter refuses it
    end
  end
end
"""


def discard(options: Options, outside: bool) -> list[Json]:
    """The filter that discards too large bodies. `outside`: it acts only if a route enables it. None in the request
    mode `buffered`, where no filter waits for the end of a body that ext_proc does not see."""
    if options.request_mode != "whole":
        return []
    names = f'"{OWN_NAMESPACE}", "{TOO_LARGE}"'
    values = f"local LIMIT, DISCARDED, NAMESPACE, TOO_LARGE = {options.body_limit}, {DISCARDED}, {names}"
    return [{**lua(DISCARD, values + _DISCARD_SOURCE), "disabled": outside}]
