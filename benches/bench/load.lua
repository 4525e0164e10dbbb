-- One kind of work for wrk, named by WORK. The users 1 to 100000 are there; a delete needs FIRST, an id from which on
-- each user is there.
local work, first = os.getenv("WORK"), tonumber(os.getenv("FIRST"))
local n, seed = 0, os.getenv("SEED")
local headers = { ["Content-Type"] = "application/json" }
math.randomseed(tonumber(seed))

local function id() return math.random(1, 100000) end

local kinds = {
  get = function() return wrk.format("GET", "/users/" .. id()) end,
  email = function() return wrk.format("GET", "/users?email=user" .. id() .. "@example.com") end,
  list = function() return wrk.format("GET", "/users?page=" .. math.random(1, 6000)) end,
  post = function()
    return wrk.format("POST", "/users", headers, '{"name":"Load Test","email":"n' .. n .. "-" .. seed .. '@example.com"}')
  end,
  put = function() return wrk.format("PUT", "/users/" .. id(), headers, '{"name":"Name ' .. n .. "-" .. seed .. '"}') end,
  delete = function() return wrk.format("DELETE", "/users/" .. first + n - 1) end,
}
kinds.mixed = function()
  local dice = n % 10
  return kinds[dice < 2 and "post" or dice < 4 and "put" or "get"]()
end

request = function()
  n = n + 1
  return kinds[work]()
end
