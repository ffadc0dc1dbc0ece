# Schedules jobs of Sidekiq's, as an application that has it does; prints their arguments and times, in s, as JSON.
# `sidekiq -r` this file has a worker for them, which fails on each.

require "sidekiq"

class Mail
  include Sidekiq::Worker
  sidekiq_options queue: "mail"
  sidekiq_retry_in { 3600 }

  def perform(name) = raise("no line")
end

if __FILE__ == $PROGRAM_NAME
  exact = 1_900_000_000.25
  Mail.perform_at(exact, "at a time")
  from = Time.now.to_f
  Mail.perform_in(3600, "in an hour")
  to = Time.now.to_f
  Mail.set(queue: "other").perform_in(3600, "of another queue")
  Mail.perform_async("fails")
  puts JSON.generate("at a time" => [exact, exact], "in an hour" => [from + 3600, to + 3600])
end
