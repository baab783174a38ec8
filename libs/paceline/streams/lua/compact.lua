-- Returns how many branches were there, and how many of these stay because they have no fate.
-- KEYS: ledger, undecided, fates, totals, steps
-- ARGV: last step, branches passed over, branches looked at
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
