-- After add.lua. Returns the entry's id. The marker holds the id: a call that is repeated after a
-- lost answer finds its own.
-- KEYS: stream, marker, sizes
-- ARGV: marker lifetime in ms, budget in bytes (0 = none), size, then field, value, ...
local id = redis.call('GET', KEYS[2])
if not id then
  id = add(KEYS[1], KEYS[3], tonumber(ARGV[2]), ARGV[3], tail(4))
  redis.call('SET', KEYS[2], id, 'PX', ARGV[1])
end
return id
