-- Returns open, lost, then total, count, ...
-- KEYS: trajectories, undecided, totals
local ids, open = redis.call('HVALS', KEYS[2]), 0
for _, id in ipairs(ids) do open = open + #redis.call('XRANGE', KEYS[1], id, id) end
local reply = redis.call('HGETALL', KEYS[3])
table.insert(reply, 1, #ids - open)
table.insert(reply, 1, open)
return reply
