-- All or none: where another writer has archived as much, the XADD fails.
-- KEYS: journal, its archive, snapshot, records of steps
-- ARGV: number of the last entry that the snapshot stands for, the entries up to it that are not
-- archived, packed, the snapshot, then step, record, ...
redis.call('XADD', KEYS[2], ARGV[1] .. '-0', 'entries', ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
for index = 4, #ARGV, 2 do redis.call('HSET', KEYS[4], ARGV[index], ARGV[index + 1]) end
redis.call('XTRIM', KEYS[1], 'MINID', '=', string.format('%d-0', ARGV[1] + 1))
