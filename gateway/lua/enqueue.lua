-- Append one HTTP request's entries to a model's request stream, all or none.
-- KEYS[1]  the stream
-- ARGV[1]  how many entries the stream may hold (queued or running)
-- ARGV[2]  the field name
-- ARGV[3…] one payload each
-- Returns the entry ids in order, or false when they do not fit.
local num_new = #ARGV - 2
if redis.call('XLEN', KEYS[1]) + num_new > tonumber(ARGV[1]) then
  return false
end
local ids = {}
for i = 1, num_new do
  ids[i] = redis.call('XADD', KEYS[1], '*', ARGV[2], ARGV[2 + i])
end
return ids
