"""What the shared index does inside the server, each script at once: no reader sees half of it, and no entry is left over.

Keys, all under one prefix:

- ``cache:hotness:<model hash>``: sorted set, member = span in hex, score = last access, Unix seconds of the server's clock.
- ``cache:spans:<model hash>:<node>``: hash, field = span in hex, value = ``SpanEntry``; field "" is the writer's mark. One
  hash per node, so a node writes blindly (nobody reads, changes and writes back), and what a dead node said is one key.
- ``cache:spans:nodes``: hash, node to ``<epoch> <worker>``. A node that is not in it writes nothing.
- ``cache:spans:models``: sorted set of the models, score = when each was last written.
- ``cache:node:<node>``: lease of a node, expires.

The scripts find the nodes' keys from the list of nodes, so all keys must lie on one server: with a Redis cluster use a
prefix with a hash tag, such as ``{kv}:``.

Commands: EVALSHA, SCRIPT LOAD, PING, INFO (optional), ZMSCORE; in scripts HGET HSET HDEL HEXISTS HMGET HKEYS HGETALL
HLEN HSCAN ZADD (with GT) ZREM ZREMRANGEBYSCORE ZPOPMIN ZCARD ZRANGE ZRANGEBYSCORE TYPE TIME EXISTS SET PEXPIRE UNLINK.
Redis 7 or Valkey 7.2 and later have all of them.
"""

from __future__ import annotations

import hashlib
from typing import Final

_COMMON: Final = """
local function forget(spans_prefix, model, nodes, fields)
  if #fields == 0 then return end
  for _, node in ipairs(nodes) do
    redis.pcall('HDEL', spans_prefix .. model .. ':' .. node, unpack(fields))
  end
end
local function pop(hotness, spans_prefix, model, nodes, count)
  local popped = redis.pcall('ZPOPMIN', hotness, math.min(count, 1000))
  if popped.err then return 0 end
  local fields = {}
  for i = 1, #popped, 2 do fields[#fields + 1] = popped[i] end
  forget(spans_prefix, model, nodes, fields)
  return #fields
end
local function unheld(spans_prefix, model, nodes, except, fields)
  local held, left = {}, {}
  for _, node in ipairs(nodes) do
    if node ~= except then
      local values = redis.pcall('HMGET', spans_prefix .. model .. ':' .. node, unpack(fields))
      if not values.err then
        for i = 1, #fields do if values[i] then held[i] = true end end
      end
    end
  end
  for i = 1, #fields do if not held[i] then left[#left + 1] = fields[i] end end
  return left
end
local function drop_model(hotness_prefix, spans_prefix, model, nodes)
  redis.call('UNLINK', hotness_prefix .. model)
  for _, node in ipairs(nodes) do redis.call('UNLINK', spans_prefix .. model .. ':' .. node) end
end
"""

BATCH: Final = (
    _COMMON
    + """
-- KEYS nodes, models, hotness, spans of this node; ARGV see RedisIndex. Returns {told, fresh, mended, trimmed, members}.
local nodes_key, models_key, hotness, spans = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local node, mark, model, noted, dropped, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local members_max, total_max, models_max = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local hotness_prefix, spans_prefix = ARGV[10], ARGV[11]
if redis.call('HGET', nodes_key, node) ~= mark then return {0, 1, 0, 0, 0} end
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
-- A server without memory refuses the first write of a script only, and any write is one; so this one comes first.
if #noted > 0 then redis.call('ZADD', models_key, string.format('%.3f', now), model) end
local mended = 0
local function is_there(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then
    redis.call('UNLINK', key)
    mended = mended + 1
    return false
  end
  return found == kind
end
local fresh = 1
local hotness_there = is_there(hotness, 'zset')
if is_there(spans, 'hash') and redis.call('HGET', spans, '') == mark and hotness_there then fresh = 0 end
local nodes = redis.call('HKEYS', nodes_key)
mended = mended + redis.call('ZREMRANGEBYSCORE', hotness, string.format('(%.6f', now + 60), '+inf')
local scores, entries, at = {}, {'', mark}, 1
while at <= #noted do
  local span, age, size
  span, age, size, at = struct.unpack('<c32dH', noted, at)
  scores[#scores + 1] = string.format('%.6f', now - age)
  scores[#scores + 1] = span
  entries[#entries + 1] = span
  entries[#entries + 1] = string.sub(noted, at, at + size - 1)
  at = at + size
end
if #scores > 0 then
  redis.call('ZADD', hotness, 'GT', unpack(scores))
  redis.call('HSET', spans, unpack(entries))
end
if #dropped > 0 then
  local gone = {}
  for i = 1, #dropped, 32 do gone[#gone + 1] = string.sub(dropped, i, i + 31) end
  redis.call('HDEL', spans, unpack(gone))
  local left = unheld(spans_prefix, model, nodes, node, gone)
  if #left > 0 then redis.call('ZREM', hotness, unpack(left)) end
end
local trimmed = 0
for _ = 1, 4 do
  local excess = redis.call('ZCARD', hotness) - members_max
  if excess <= 0 then break end
  trimmed = trimmed + pop(hotness, spans_prefix, model, nodes, excess)
end
if total_max > 0 then
  local models = redis.call('ZRANGE', models_key, 0, -1)
  while #models > models_max do
    local oldest = table.remove(models, 1)
    drop_model(hotness_prefix, spans_prefix, oldest, nodes)
    redis.call('ZREM', models_key, oldest)
  end
  local total = 0
  for _, name in ipairs(models) do
    local count = redis.pcall('ZCARD', hotness_prefix .. name)
    if type(count) == 'number' then total = total + count end
  end
  for _ = 1, 8 do
    if total <= total_max then break end
    local coldest, coldest_score = nil, nil
    for _, name in ipairs(models) do
      local first = redis.pcall('ZRANGE', hotness_prefix .. name, 0, 0, 'WITHSCORES')
      if not first.err and first[2] and (coldest == nil or tonumber(first[2]) < coldest_score) then
        coldest, coldest_score = name, tonumber(first[2])
      end
    end
    if coldest == nil then break end
    local popped = pop(hotness_prefix .. coldest, spans_prefix, coldest, nodes, math.min(total - total_max, 256))
    total, trimmed = total - popped, trimmed + popped
  end
end
redis.call('PEXPIRE', hotness, ttl_ms)
redis.call('PEXPIRE', spans, ttl_ms)
redis.call('PEXPIRE', models_key, ttl_ms * 2)
return {1, fresh, mended, trimmed, redis.call('ZCARD', hotness)}
"""
)

BEAT: Final = (
    _COMMON
    + """
-- KEYS nodes, models, lease of this node.
-- Returns {known, full, seconds, microseconds, number of nodes, dead ones, ones of this worker}.
local nodes_key, models_key, lease = KEYS[1], KEYS[2], KEYS[3]
local node, mark, worker, lease_ms, ttl_ms, nodes_max = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local lease_prefix, hotness_prefix, spans_prefix = ARGV[7], ARGV[8], ARGV[9]
local time = redis.call('TIME')
local known, full, dead, same = 0, 0, {}, {}
if redis.call('HGET', nodes_key, node) == mark then known = 1 end
if known == 0 and redis.call('HEXISTS', nodes_key, node) == 0 and redis.call('HLEN', nodes_key) >= nodes_max then
  full = 1
else
  -- A server without memory still lets what is there live longer, so the lease outlasts its trouble.
  if known == 0 then redis.call('HSET', nodes_key, node, mark) end
  if redis.call('PEXPIRE', lease, lease_ms) == 0 then redis.call('SET', lease, mark, 'PX', lease_ms) end
end
redis.call('PEXPIRE', nodes_key, ttl_ms * 2)
local all = redis.call('HGETALL', nodes_key)
local names = {}
for i = 1, #all, 2 do
  names[#names + 1] = all[i]
  if all[i] ~= node then
    if string.match(all[i + 1], ' (.*)$') == worker then same[#same + 1] = all[i] end
    if redis.call('EXISTS', lease_prefix .. all[i]) == 0 then dead[#dead + 1] = all[i] end
  end
end
redis.call('ZREMRANGEBYSCORE', models_key, string.format('(%d', tonumber(time[1]) + 60), '+inf')
local before = string.format('%.3f', tonumber(time[1]) - ttl_ms / 1000)
for _, model in ipairs(redis.call('ZRANGEBYSCORE', models_key, '-inf', before, 'LIMIT', 0, 8)) do
  drop_model(hotness_prefix, spans_prefix, model, names)
  redis.call('ZREM', models_key, model)
end
return {known, full, tonumber(time[1]), tonumber(time[2]), #names, dead, same}
"""
)

SWEEP: Final = (
    _COMMON
    + """
-- KEYS nodes, lease of the dead node, hotness, spans of the dead node. Returns {next cursor, removed}; '-' when it lives.
local dead, model, cursor, count, spans_prefix = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if redis.call('EXISTS', KEYS[2]) == 1 then return {'-', 0} end
-- From the first step on it counts as swept: should it wake up in the middle, it finds its mark gone and tells all again.
-- (The name of its worker stays. HDEL comes first since a server without memory refuses an HSET that does.)
local mark = redis.call('HGET', KEYS[1], dead)
redis.call('HDEL', KEYS[1], dead)
if mark then redis.call('HSET', KEYS[1], dead, 'swept' .. (string.match(mark, ' .*$') or ' ')) end
if redis.call('TYPE', KEYS[4]).ok ~= 'hash' then
  redis.call('UNLINK', KEYS[4])
  return {'0', 0}
end
local found = redis.call('HSCAN', KEYS[4], cursor, 'COUNT', count)
local fields = {}
for i = 1, #found[2], 2 do fields[#fields + 1] = found[2][i] end
for first = 1, #fields, 500 do
  local some = {}
  for i = first, math.min(first + 499, #fields) do some[#some + 1] = fields[i] end
  local left = unheld(spans_prefix, model, redis.call('HKEYS', KEYS[1]), dead, some)
  if #left > 0 then redis.pcall('ZREM', KEYS[3], unpack(left)) end
  redis.call('HDEL', KEYS[4], unpack(some))
end
if found[1] == '0' then redis.call('UNLINK', KEYS[4]) end
return {found[1], #fields}
"""
)

FORGET: Final = """
-- KEYS nodes, lease of the dead node. Strikes it off the list when nothing of it is left.
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""

RELIEVE: Final = (
    _COMMON
    + """
-- KEYS nodes, models. The server has no memory left: a tenth of each model's coldest spans goes, down to a floor.
local floor, hotness_prefix, spans_prefix = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local nodes, removed = redis.call('HKEYS', KEYS[1]), 0
for _, model in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local count = redis.pcall('ZCARD', hotness_prefix .. model)
  if type(count) == 'number' and count > floor then
    for _ = 1, math.ceil(count / 10000) do
      removed = removed + pop(hotness_prefix .. model, spans_prefix, model, nodes, math.ceil(math.min(count, 10000) / 10))
    end
  end
end
return removed
"""
)

HOLDERS: Final = """
-- KEYS nodes. Returns {node, {value or false of each span}, node, ...} of the nodes that have a lease.
local model, lease_prefix, spans_prefix, spans = ARGV[1], ARGV[2], ARGV[3], {}
for i = 4, #ARGV do spans[#spans + 1] = ARGV[i] end
local answer = {}
for _, node in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('EXISTS', lease_prefix .. node) == 1 then
    local values = redis.pcall('HMGET', spans_prefix .. model .. ':' .. node, unpack(spans))
    if not values.err then
      answer[#answer + 1] = node
      answer[#answer + 1] = values
    end
  end
end
return answer
"""

ALL: Final = (BATCH, BEAT, SWEEP, FORGET, RELIEVE, HOLDERS)


def sha_of(script: str) -> str:
    """The name by which a server knows a script."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
