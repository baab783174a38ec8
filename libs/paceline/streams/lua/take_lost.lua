-- After note.lua. Returns the records of the sessions that this process has taken: sessions of
-- former processes of which the ledger knew no branch. A call that is repeated after a lost answer
-- returns them again. Value of an open session: mark, hash of its API key, ledger record, record, a
-- line each; a lost session's value lacks the third.
-- KEYS: open sessions, ledger, lost sessions, their API keys, their times, totals, steps
-- ARGV: mark of this process, now in s, seconds kept, sessions kept, branches looked at, prefix of
-- the marks of the processes from which it takes
local now, kept_s, kept = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local function forget(session)
  local value = redis.call('HGET', KEYS[3], session)
  local api_key = value and string.match(value, '^[^\n]*\n([^\n]*)\n')
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
  local lines = '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)$'
  local mark, api_key, about, record = string.match(value, lines)
  if mark ~= ARGV[1] and string.sub(mark, 1, #ARGV[6]) == ARGV[6] then
    redis.call('HDEL', KEYS[1], session)
    if not known(session) then
      local noted = cjson.decode(about)
      note(KEYS[2], KEYS[6], KEYS[7], session .. '/0', about, noted.step or 0, noted.reason)
      redis.call('HSET', KEYS[3], session, ARGV[1] .. '\n' .. api_key .. '\n' .. record)
      redis.call('ZADD', KEYS[5], now, session)
      if api_key ~= '' then redis.call('HSET', KEYS[4], api_key, session) end
    end
  end
end
local taken, lost = {}, redis.call('HGETALL', KEYS[3])
for index = 2, #lost, 2 do
  local mark, record = string.match(lost[index], '^([^\n]*)\n[^\n]*\n([^\n]*)$')
  if mark == ARGV[1] then taken[#taken + 1] = record end
end
local old = redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', now - kept_s)
for _, session in ipairs(old) do forget(session) end
for _, session in ipairs(redis.call('ZRANGE', KEYS[5], 0, -kept - 1)) do forget(session) end
for index = 3, 5 do redis.call('EXPIRE', KEYS[index], kept_s) end
return taken
