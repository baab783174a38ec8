"""The Lua scripts of the streams, with their keys and arguments. Their callers define the meaning.

A script runs completely or not at all, so an append and its bookkeeping are one step. Sizes of a
stream's entries are in the hash `<stream>:sizes` (id -> bytes, and the field `total`). A script
that calls `add`, `remove` or `note` begins with ADD, REMOVE or NOTE.
"""

ADD = """
local function add(stream, sizes, budget, size, pairs)
  local id = redis.call('XADD', stream, '*', unpack(pairs))
  redis.call('HSET', sizes, id, size)
  local total = redis.call('HINCRBY', sizes, 'total', size)
  while budget > 0 and total > budget do
    local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1][1]
    redis.call('XDEL', stream, oldest)
    local size = tonumber(redis.call('HGET', sizes, oldest)) or 0
    total = redis.call('HINCRBY', sizes, 'total', -size)
    redis.call('HDEL', sizes, oldest)
  end
  return id
end
local function tail(from)
  local rest = {}
  for index = from, #ARGV do rest[#rest + 1] = ARGV[index] end
  return rest
end
"""
"""`add` appends an entry and returns its id; a budget > 0 pushes out the oldest entries."""

REMOVE = """
local function remove(stream, sizes, id)
  if redis.call('XDEL', stream, id) == 1 then
    redis.call('HINCRBY', sizes, 'total', -(tonumber(redis.call('HGET', sizes, id)) or 0))
    redis.call('HDEL', sizes, id)
  end
end
"""
"""`remove` deletes an entry and its size."""

NOTE = """
local function note(ledger, totals, steps, branch, record, step, reason)
  if redis.call('HSETNX', ledger, branch, record) == 1 then
    redis.call('HINCRBY', totals, 'unpublished:' .. reason, 1)
    redis.call('ZADD', steps, step, branch)
  end
end
"""
"""`note` writes a branch's record that is not final, unless the ledger has one."""

APPEND = """
local id = redis.call('GET', KEYS[2])
if not id then
  id = add(KEYS[1], KEYS[3], tonumber(ARGV[2]), ARGV[3], tail(4))
  redis.call('SET', KEYS[2], id, 'PX', ARGV[1])
end
return id
"""
"""After ADD. KEYS: stream, marker, sizes. ARGV: marker lifetime in ms, budget in bytes (0 = none),
size, then field, value, ... Returns the id. The marker holds the id: a call that is repeated after
a lost answer finds its own.
"""

ACK = """
for index = 3, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[index])
  if ARGV[2] == '1' then remove(KEYS[1], KEYS[2], ARGV[index]) end
end
"""
"""After REMOVE. KEYS: stream, sizes. ARGV: group, 1 to delete, ids."""

DEAD_LETTER = """
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return end
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[3], '*', unpack(tail(4)))
remove(KEYS[1], KEYS[2], ARGV[2])
"""
"""After REMOVE. KEYS: stream, sizes, dead letters. ARGV: group, id, dead letters kept, then field,
value, ...
"""

APPEND_FINAL = """
local branch, step = ARGV[1], tonumber(ARGV[3])
local noted = redis.call('HGET', KEYS[3], branch)
if noted then
  local before = cjson.decode(noted)
  if before.final then return 0 end
  redis.call('HINCRBY', KEYS[6], 'unpublished:' .. before.reason, -1)
end
redis.call('HSET', KEYS[3], branch, ARGV[2])
redis.call('ZADD', KEYS[7], step, branch)
redis.call('HINCRBY', KEYS[6], 'final', 1)
if step <= tonumber(redis.call('HGET', KEYS[6], 'compacted') or -1) then
  redis.call('HSET', KEYS[5], branch, 'dropped:late')
  redis.call('HINCRBY', KEYS[6], 'dropped:late', 1)
  return 0
end
redis.call('HSET', KEYS[4], branch, add(KEYS[1], KEYS[2], 0, ARGV[4], tail(5)))
return 1
"""
"""After ADD. KEYS: trajectories, sizes, ledger, undecided, fates, totals, steps. ARGV: branch,
ledger record, step, size, then field, value, ... Returns 1 when appended. A branch of a compacted
step is not appended: no step would train it.
"""

RECORD_UNPUBLISHED = """
note(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
"""
"""After NOTE. KEYS: ledger, totals, steps. ARGV: branch, ledger record, step, reason."""

MARK = """
local function total(fate) return string.match(fate, '^trained') or fate end
for index = 1, #ARGV, 2 do
  local branch, fate = ARGV[index], ARGV[index + 1]
  local old = redis.call('HGET', KEYS[2], branch)
  if old and total(old) ~= 'trained' or redis.call('HDEL', KEYS[1], branch) == 1 then
    if old then redis.call('HINCRBY', KEYS[3], total(old), -1) end
    redis.call('HSET', KEYS[2], branch, fate)
    redis.call('HINCRBY', KEYS[3], total(fate), 1)
  end
end
"""
"""KEYS: undecided, fates, totals. ARGV: branch, fate, ... A fate is 'trained:<step>' or
'dropped:<reason>'; trained stays. Unknown branches are passed over: their steps are compacted.
"""

JOURNAL = """
for index = 2, #ARGV do
  local id = string.format('%d-0', ARGV[1] + index - 2)
  redis.call('XADD', KEYS[1], id, 'entry', ARGV[index])
end
"""
"""KEYS: journal. ARGV: number of the first entry, then entries. All or none: where another writer
has the first number, the first XADD fails.
"""

SNAPSHOT = """
redis.call('XADD', KEYS[2], ARGV[1] .. '-0', 'entries', ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
for index = 4, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[index], ARGV[index + 1]) end
redis.call('XTRIM', KEYS[1], 'MINID', '=', string.format('%d-0', ARGV[1] + 1))
"""
"""KEYS: journal, its archive, snapshot, records of steps. ARGV: number of the last entry that the
snapshot stands for, the entries up to it that are not archived, packed, the snapshot, then step,
record, ... All or none: where another writer has archived as much, the XADD fails.
"""

COMPACT = """
local last = tonumber(ARGV[1])
if last > tonumber(redis.call('HGET', KEYS[4], 'compacted') or -1) then
  redis.call('HSET', KEYS[4], 'compacted', last)
end
local found = redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', last, 'LIMIT', ARGV[2], ARGV[3])
local stay = 0
for _, branch in ipairs(found) do
  if redis.call('HEXISTS', KEYS[2], branch) == 1 then
    stay = stay + 1
  else
    redis.call('HDEL', KEYS[1], branch)
    redis.call('HDEL', KEYS[3], branch)
    redis.call('ZREM', KEYS[5], branch)
  end
end
return {#found, stay}
"""
"""KEYS: ledger, undecided, fates, totals, steps. ARGV: last step, branches passed over, branches
looked at. Returns how many were there, and how many of these stay because they have no fate.
"""

COUNT = """
local ids, open = redis.call('HVALS', KEYS[2]), 0
for _, id in ipairs(ids) do open = open + #redis.call('XRANGE', KEYS[1], id, id) end
local reply = redis.call('HGETALL', KEYS[3])
table.insert(reply, 1, #ids - open)
table.insert(reply, 1, open)
return reply
"""
"""KEYS: trajectories, undecided, totals. Returns open, lost, then total, count, ..."""

TAKE_LOST = """
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
  local mark, api_key, about, record = string.match(value, lines)
  if mark ~= ARGV[1] and string.sub(mark, 1, #ARGV[6]) == ARGV[6] then
    redis.call('HDEL', KEYS[1], session)
    if not known(session) then
      local noted = cjson.decode(about)
      note(KEYS[2], KEYS[6], KEYS[7], session .. '/0', about, noted.step or 0, noted.reason)
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
"""After NOTE. KEYS: open sessions, ledger, lost sessions, their API keys, their times, totals,
steps. ARGV: mark of this process, now in s, seconds kept, sessions kept, branches looked at, prefix
of the marks of the processes from which it takes.

Value of an open session: mark, hash of its API key, ledger record, record, a line each; a lost
session's value lacks the third. Returns the records of the sessions that this process has taken:
sessions of former processes of which the ledger knew no branch. A call that is repeated after a
lost answer returns them again.
"""
