-- Keep the answer to an idempotent request, and of one API key only the newest ones.
-- KEYS[1]  the record
-- KEYS[2]  the API key's index: names of records by time
-- ARGV[1]  the record with the answer
-- ARGV[2]  milliseconds that it is kept
-- ARGV[3]  Unix time, seconds
-- ARGV[4]  how many records the API key may have
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], KEYS[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[3] - ARGV[2] / 1000)
local excess = redis.call('ZCARD', KEYS[2]) - ARGV[4]
for _ = 1, excess do
  redis.call('DEL', redis.call('ZPOPMIN', KEYS[2])[1])
end
