-- Hand what no worker has read yet to the consumer of waiting entries, and list what it holds.
-- One atomic step. KEYS[1] requests stream; ARGV: group, that consumer's name, how many at most.
-- Returns entry ids, oldest first.
local stream, group, waiting, limit = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local ids = {}
for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', limit, waiting)) do
  ids[#ids + 1] = pending[1]
end
if #ids < limit then
  local read = redis.call(
    'XREADGROUP', 'GROUP', group, waiting, 'COUNT', limit - #ids, 'STREAMS', stream, '>')
  for _, entry in ipairs(read and read[1][2] or {}) do
    ids[#ids + 1] = entry[1]
  end
end
return ids
