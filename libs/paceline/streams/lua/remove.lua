-- `remove` deletes an entry and its size.
local function remove(stream, sizes, id)
  if redis.call('XDEL', stream, id) == 1 then
    redis.call('HINCRBY', sizes, 'total', -(tonumber(redis.call('HGET', sizes, id)) or 0))
    redis.call('HDEL', sizes, id)
  end
end
