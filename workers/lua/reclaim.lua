-- Take over entries whose worker is gone. One atomic step, so that two workers never take the same one.
-- KEYS[1] requests stream; ARGV: group, own consumer name, how many at most, prefix of worker status keys,
-- the consumer of waiting entries, which is no worker.
-- Returns {entry id, payload, number of deliveries} for each entry taken.
local stream, group, me = KEYS[1], ARGV[1], ARGV[2]
local room, prefix, waiting = tonumber(ARGV[3]), ARGV[4], ARGV[5]
local taken = {}
if redis.call('EXISTS', stream) == 0 then return taken end
local summary = redis.pcall('XPENDING', stream, group)
if summary.err or not summary[4] then return taken end
for _, consumer in ipairs(summary[4]) do
  local name = consumer[1]
  if room <= 0 then break end
  if name ~= me and name ~= waiting and redis.call('EXISTS', prefix .. name) == 0 then
    for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', room, name)) do
      -- An entry that was deleted meanwhile comes back empty, and leaves the pending list.
      local claimed = redis.call('XCLAIM', stream, group, me, 0, pending[1])
      if claimed[1] then
        taken[#taken + 1] = {claimed[1][1], claimed[1][2][2], pending[4] + 1}
        room = room - 1
      end
    end
  end
end
return taken
