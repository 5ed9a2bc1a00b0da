-- Ends a stored response that is still in progress; one that was cancelled, deleted or ended stays as it is.
-- KEYS: the response. ARGV: status, body ('' keeps the one that is there). Returns 1 if it was ended here.
if redis.call('HGET', KEYS[1], 'status') ~= 'in_progress' then
  return 0
end
redis.call('HSET', KEYS[1], 'status', ARGV[1])
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], 'body', ARGV[2])
end
return 1
