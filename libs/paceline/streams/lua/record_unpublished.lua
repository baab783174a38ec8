-- After note.lua.
-- KEYS: ledger, totals, steps
-- ARGV: branch, ledger record, step, reason
note(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
