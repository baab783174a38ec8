-- After add.lua. Returns 1 when appended. A branch of a compacted step is not appended: no step
-- would train it.
-- KEYS: trajectories, sizes, ledger, undecided, fates, totals, steps
-- ARGV: branch, ledger record, step, size, then field, value, ...
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
