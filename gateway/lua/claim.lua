-- Take the name of an idempotent request, if nobody has it or it is still as the caller has seen it.
-- KEYS[1]  the record
-- ARGV[1]  the caller's own record
-- ARGV[2]  milliseconds that the claim lasts
-- ARGV[3]  the record of a gateway that is dead, which may be replaced; empty for none
-- Returns false when the name is the caller's now, else the record that is there.
local found = redis.call('GET', KEYS[1])
if found and found ~= ARGV[3] then
  return found
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
