-- After remove.lua.
-- KEYS: stream, sizes
-- ARGV: group, ids
for index = 2, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[index])
  remove(KEYS[1], KEYS[2], ARGV[index])
end
