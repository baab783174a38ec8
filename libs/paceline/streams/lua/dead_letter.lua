-- After add.lua and remove.lua.
-- KEYS: stream, sizes, dead letters
-- ARGV: group, id, dead letters kept, then field, value, ...
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return end
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[3], '*', unpack(tail(4)))
remove(KEYS[1], KEYS[2], ARGV[2])
