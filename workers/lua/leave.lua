-- Remove a consumer that has nothing pending (removing one that has would lose its entries).
-- KEYS[1] requests stream; ARGV: group, consumer name.
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then return 0 end
for _, consumer in ipairs(consumers) do
  if consumer[2] == ARGV[2] and consumer[4] == 0 then
    return redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  end
end
return 0
