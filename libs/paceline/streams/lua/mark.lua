-- A fate is 'trained:<step>' or 'dropped:<reason>'; trained stays. Unknown branches are passed
-- over: their steps are compacted.
-- KEYS: undecided, fates, totals
-- ARGV: branch, fate, ...
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
