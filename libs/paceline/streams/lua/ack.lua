-- After remove.lua.
-- KEYS: stream, sizes
-- ARGV: group, 1 to delete, ids
for index = 3, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[index])
  if ARGV[2] == '1' then remove(KEYS[1], KEYS[2], ARGV[index]) end
end
