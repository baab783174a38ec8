"""The Lua scripts of the streams. Owns their keys and arguments; the callers own the meaning.

A script runs to its end or not at all, so an append and its bookkeeping are one step. Sizes of a
stream's entries lie in the hash `<stream>:sizes` (id -> bytes, and the fields `total` and
`trimmed`).
"""

from __future__ import annotations

_APPEND = """
-- Returns id and 1 when appended, id and 0 when another call appended this key before.
-- The marker holds '<nonce> <id>': a call that is repeated after a lost answer finds its own nonce.
local function append(stream, marker, sizes, nonce, expire_ms, budget, size, pairs)
  local seen = redis.call('GET', marker)
  if seen then
    local owner, id = string.match(seen, '^(%S+) (%S+)$')
    return id, (owner == nonce and 1 or 0), true
  end
  local id = redis.call('XADD', stream, '*', unpack(pairs))
  if expire_ms > 0 then
    redis.call('SET', marker, nonce .. ' ' .. id, 'PX', expire_ms)
  else
    redis.call('SET', marker, nonce .. ' ' .. id)
  end
  redis.call('HSET', sizes, id, size)
  local total = redis.call('HINCRBY', sizes, 'total', size)
  while budget > 0 and total > budget do
    local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1][1]
    redis.call('XDEL', stream, oldest)
    local size = tonumber(redis.call('HGET', sizes, oldest)) or 0
    total = redis.call('HINCRBY', sizes, 'total', -size)
    redis.call('HDEL', sizes, oldest)
    redis.call('HINCRBY', sizes, 'trimmed', 1)
  end
  return id, 1, false
end
local function tail(from)
  local rest = {}
  for index = from, #ARGV do rest[#rest + 1] = ARGV[index] end
  return rest
end
"""

_REMOVE = """
local function remove(stream, sizes, id)
  if redis.call('XDEL', stream, id) == 1 then
    redis.call('HINCRBY', sizes, 'total', -(tonumber(redis.call('HGET', sizes, id)) or 0))
    redis.call('HDEL', sizes, id)
  end
end
"""

APPEND = (
    _APPEND
    + """
-- KEYS: stream, marker, sizes.
-- ARGV: nonce, marker lifetime in ms (0 = for ever), budget in bytes (0 = none), size,
-- then field, value, ...
local lifetime, budget = tonumber(ARGV[2]), tonumber(ARGV[3])
local id, mine = append(KEYS[1], KEYS[2], KEYS[3], ARGV[1], lifetime, budget, ARGV[4], tail(5))
return {id, mine}
"""
)

ACK = (
    _REMOVE
    + """
-- KEYS: stream, sizes. ARGV: group, 1 to delete, ids.
for index = 3, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[index])
  if ARGV[2] == '1' then remove(KEYS[1], KEYS[2], ARGV[index]) end
end
return #ARGV - 2
"""
)

DEAD_LETTER = (
    _REMOVE
    + """
-- KEYS: stream, sizes, dead letters. ARGV: group, id, dead letters kept, then field, value, ...
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
local pairs = {}
for index = 4, #ARGV do pairs[#pairs + 1] = ARGV[index] end
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[3], '*', unpack(pairs))
remove(KEYS[1], KEYS[2], ARGV[2])
return 1
"""
)

APPEND_FINAL = (
    _APPEND
    + """
-- KEYS: trajectories, marker, sizes, ledger, finals, finals of the step.
-- ARGV: nonce, branch, ledger record, size, then field, value, ...
local id, mine, before = append(KEYS[1], KEYS[2], KEYS[3], ARGV[1], 0, 0, ARGV[4], tail(5))
if not before then
  redis.call('HSET', KEYS[4], ARGV[2], ARGV[3])
  redis.call('HSET', KEYS[5], ARGV[2], id)
  redis.call('SADD', KEYS[6], ARGV[2])
end
return mine
"""
)

COUNT = """
-- KEYS: trajectories, finals, trained, dropped.
-- Returns final, trained, open, lost, then reason, count, ...
local finals = redis.call('HGETALL', KEYS[2])
local trained, open, lost, reasons = 0, 0, 0, {}
for index = 1, #finals, 2 do
  local branch, id = finals[index], finals[index + 1]
  local reason = redis.call('HGET', KEYS[4], branch)
  if redis.call('HEXISTS', KEYS[3], branch) == 1 then
    trained = trained + 1
  elseif reason then
    reasons[reason] = (reasons[reason] or 0) + 1
  elseif #redis.call('XRANGE', KEYS[1], id, id) > 0 then
    open = open + 1
  else
    lost = lost + 1
  end
end
local reply = {#finals / 2, trained, open, lost}
for reason, count in pairs(reasons) do
  reply[#reply + 1] = reason
  reply[#reply + 1] = count
end
return reply
"""

TAKE_LOST = """
-- KEYS: open sessions, ledger, lost sessions, their API keys, their times.
-- ARGV: mark of this process, now in s, seconds kept, sessions kept, branches looked at.
-- Value of an open session: mark, hash of its API key, ledger record, record, a line each;
-- a lost one lacks the third.
-- Returns the records of what this process has taken: sessions of former ones of which the
-- ledger knew no branch.
-- A call that is repeated after a lost answer returns them again.
local now, kept_s, kept = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local function forget(session)
  local value = redis.call('HGET', KEYS[3], session)
  local api_key = value and string.match(value, '^[^\\n]*\\n([^\\n]*)\\n')
  if api_key and redis.call('HGET', KEYS[4], api_key) == session then
    redis.call('HDEL', KEYS[4], api_key)
  end
  redis.call('HDEL', KEYS[3], session)
  redis.call('ZREM', KEYS[5], session)
end
local function known(session)
  local branches = {}
  for index = 0, tonumber(ARGV[5]) - 1 do branches[#branches + 1] = session .. '/' .. index end
  for _, record in ipairs(redis.call('HMGET', KEYS[2], unpack(branches))) do
    if record then return true end
  end
  return false
end
local opened = redis.call('HGETALL', KEYS[1])
for index = 1, #opened, 2 do
  local session, value = opened[index], opened[index + 1]
  local lines = '^([^\\n]*)\\n([^\\n]*)\\n([^\\n]*)\\n([^\\n]*)$'
  local mark, api_key, note, record = string.match(value, lines)
  if mark ~= ARGV[1] then
    redis.call('HDEL', KEYS[1], session)
    if not known(session) then
      redis.call('HSETNX', KEYS[2], session .. '/0', note)
      redis.call('HSET', KEYS[3], session, ARGV[1] .. '\\n' .. api_key .. '\\n' .. record)
      redis.call('ZADD', KEYS[5], now, session)
      if api_key ~= '' then redis.call('HSET', KEYS[4], api_key, session) end
    end
  end
end
local taken, lost = {}, redis.call('HGETALL', KEYS[3])
for index = 2, #lost, 2 do
  local mark, record = string.match(lost[index], '^([^\\n]*)\\n[^\\n]*\\n([^\\n]*)$')
  if mark == ARGV[1] then taken[#taken + 1] = record end
end
local old = redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', now - kept_s)
for _, session in ipairs(old) do forget(session) end
for _, session in ipairs(redis.call('ZRANGE', KEYS[5], 0, -kept - 1)) do forget(session) end
for index = 3, 5 do redis.call('EXPIRE', KEYS[index], kept_s) end
return taken
"""
