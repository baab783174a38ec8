-- `add` appends an entry and returns its id; a budget > 0 pushes out the oldest entries.
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
