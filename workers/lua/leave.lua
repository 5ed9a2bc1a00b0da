-- Remove a consumer that has nothing pending (removing one that has would lose its entries).
-- KEYS[...] streams; ARGV: group, consumer name.
for _, stream in ipairs(KEYS) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, ARGV[1])
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    if consumer[2] == ARGV[2] and consumer[4] == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, ARGV[1], ARGV[2])
    end
  end
end
