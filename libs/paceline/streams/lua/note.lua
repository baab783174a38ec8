-- `note` writes a branch's record that is not final, unless the ledger has one.
local function note(ledger, totals, steps, branch, record, step, reason)
  if redis.call('HSETNX', ledger, branch, record) == 1 then
    redis.call('HINCRBY', totals, 'unpublished:' .. reason, 1)
    redis.call('ZADD', steps, step, branch)
  end
end
