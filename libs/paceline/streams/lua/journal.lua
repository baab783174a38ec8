-- All or none: where another writer has the first number, the first XADD fails.
-- KEYS: journal
-- ARGV: number of the first entry, then entries
for index = 2, #ARGV do
  local id = string.format('%d-0', ARGV[1] + index - 2)
  redis.call('XADD', KEYS[1], id, 'entry', ARGV[index])
end
