-- Take waiting entries, those of them that still wait. One atomic step, so that two workers never take the same one.
-- KEYS[1] requests stream, KEYS[2] bell; ARGV: group, own consumer name, the consumer of waiting entries, entry ids.
-- Returns {entry id, payload, number of deliveries} for each entry taken.
local stream, group, me, waiting = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local taken = {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local pending = redis.call('XPENDING', stream, group, id, id, 1, waiting)[1]
  if pending then
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if entry then
      redis.call('XCLAIM', stream, group, me, 0, id, 'JUSTID')
      taken[#taken + 1] = {id, entry[2][2], pending[4]}
    else
      -- The gateway has removed it.
      redis.call('XACK', stream, group, id)
    end
  end
end
if redis.call('XPENDING', stream, group, '-', '+', 1, waiting)[1] then
  redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'p', '')
end
return taken
