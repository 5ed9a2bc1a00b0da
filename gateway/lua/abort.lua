-- Tell every worker of a model to abort a request, and take it off the queue if nobody has claimed it.
-- KEYS[1]  the model's aborts stream
-- KEYS[2]  the model's request stream
-- ARGV[1]  the field name
-- ARGV[2]  payload of the AbortRequest
-- ARGV[3]  entry id in the request stream; empty when it is not known
-- ARGV[4]  the consumer group
-- ARGV[5]  the consumer of entries that no worker has
-- An entry that is neither pending nor acknowledged (acknowledged ones are deleted) has never been delivered.
redis.call('XADD', KEYS[1], 'MAXLEN', '~', 10000, '*', ARGV[1], ARGV[2])
if ARGV[3] == '' then
  return 0
end
local pending = redis.pcall('XPENDING', KEYS[2], ARGV[4], ARGV[3], ARGV[3], 1)
if pending.err or #pending == 0 or pending[1][2] == ARGV[5] then
  redis.pcall('XACK', KEYS[2], ARGV[4], ARGV[3])
  return redis.call('XDEL', KEYS[2], ARGV[3])
end
return 0
