package delaylake;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.time.Instant;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Collectors;
import java.util.stream.StreamSupport;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/** The steps that all clients pass on a running service. */
@EnabledIfEnvironmentVariable(named = "DELAYLAKE_URL", matches = ".+", disabledReason = "names no service")
class ContractTest {
    private static final Duration TIMEOUT = Duration.ofSeconds(150);
    private final Map<String, MessageId> messages = new HashMap<>();

    private record Answer(Object found, String error, List<Outcome> outcomes) {}

    @Test
    void theStepsThatAllClientsPass() throws Exception {
        String steps = Files.readString(Path.of("../../contract.json"));
        for (Map<String, Object> step : Json.objects(Json.object("{\"steps\":" + steps + "}").get("steps"))) {
            String title = (String) step.get("title");
            Answer told = settled(step);
            assertEquals(step.get("error"), told.error, title + ": " + told);
            if (step.containsKey("outcomes")) {
                Map<String, String> results = told.outcomes.stream().collect(Collectors.toMap(Outcome::subscription, Outcome::result));
                assertEquals(new TreeMap<>(Json.properties(step.get("outcomes"))), new TreeMap<>(results), title);
            }
            if (step.containsKey("as")) messages.put((String) step.get("as"), (MessageId) told.found);
            if (step.containsKey("redriven")) {
                Redriven redriven = (Redriven) told.found;
                assertEquals(step.get("redriven"), Map.of("matched", redriven.matched(), "redriven", redriven.redriven()), title);
            }
            if (step.containsKey("sameAs")) assertEquals(messages.get(step.get("sameAs")), told.found, title);
        }
    }

    /** What a step is answered; until what it waits for is listed. */
    private Answer settled(Map<String, Object> step) throws InterruptedException {
        Instant deadline = Instant.now().plus(TIMEOUT);
        while (true) {
            boolean isOver = Instant.now().isAfter(deadline);
            try {
                Object found = done(step);
                Object wanted = waitedFor(step);
                if (wanted == null) return new Answer(found, null, found instanceof List<?> list ? outcomes(list) : List.of());
                if (wanted.equals(summary(step, found))) return new Answer(found, null, List.of());
                assertTrue(!isOver, step.get("title") + ": " + found + ", not " + wanted);
            } catch (DelayLakeException error) {
                boolean mayBeSeen = step.containsKey("until") && error instanceof DelayLakeException.NotFound && !isOver;
                if (!mayBeSeen) return new Answer(error.getMessage(), error.getClass().getSimpleName(), error.outcomes());
            }
            Thread.sleep(200);
        }
    }

    /** What a step's answer is to be before it goes on, as a summary; null: any. */
    private Object waitedFor(Map<String, Object> step) {
        if (step.containsKey("waitingFor")) return List.of(step.get("waitingFor"), step.get("cancelledFor"));
        if (step.containsKey("dryRun")) return ((Map<?, ?>) step.get("redriven")).get("matched");
        if (!step.containsKey("listed")) return null;
        Object end = step.getOrDefault("expiresAt", step.getOrDefault("expiresAfterMillis", 0L));
        return Json.texts(step.get("listed")).stream().map(name -> List.of(messages.get(name), end)).toList();
    }

    private static Object summary(Map<String, Object> step, Object found) {
        if (found instanceof MessageState state) {
            return List.of(state.waitingFor().stream().sorted().toList(), state.cancelledFor().stream().sorted().toList());
        }
        if (found instanceof Redriven redriven) return redriven.matched();
        return ((List<?>) found).stream().map(one -> List.of(id(one), end(step, one))).toList();
    }

    private static MessageId id(Object listed) {
        return listed instanceof Schedule schedule ? schedule.id() : ((PendingMessage) listed).id();
    }

    private static long end(Map<String, Object> step, Object listed) {
        if (!(listed instanceof PendingMessage message)) return 0;
        if (step.containsKey("expiresAt")) return message.expiresAt().toEpochMilli();
        return step.containsKey("expiresAfterMillis") ? Duration.between(message.deliverAt(), message.expiresAt()).toMillis() : 0;
    }

    private static List<Outcome> outcomes(List<?> found) {
        return found.stream().map(Outcome.class::cast).toList();
    }

    private Object done(Map<String, Object> step) {
        String token = (String) step.getOrDefault("token", System.getenv("DELAYLAKE_TOKEN"));
        Client lake = Client.of(System.getenv("DELAYLAKE_URL")).withToken(token).withTimeout(TIMEOUT);
        String topic = System.getenv("DELAYLAKE_TOPIC") + (step.containsKey("topic") ? "_" + step.get("topic") : "");
        Target target = Target.subscription((String) step.getOrDefault("subscription", "*"));
        if (step.containsKey("requestId")) target = target.requestId("java-" + step.get("requestId"));
        Duration after = Duration.ofMillis((Long) step.getOrDefault("afterMillis", 0L));
        return switch ((String) step.get("do")) {
            case "schedule" -> lake.schedule(topic, message(step, after));
            case "cancel" -> lake.cancel(topic, named(step), target);
            case "skip" -> lake.skip(topic, named(step), target);
            case "reschedule" -> lake.reschedule(topic, named(step), Instant.now().plus(after), target);
            case "postpone" -> lake.postpone(topic, named(step), Duration.ofMillis((Long) step.get("byMillis")), target);
            case "deliverNow" -> lake.deliverNow(topic, named(step), target);
            case "restore" -> lake.restore(topic, (MessageId) named(step), target);
            case "retry" -> lake.retry(topic, (MessageId) named(step), (String) step.get("reason"), null, target);
            case "endSchedule" -> lake.endSchedule(topic, (MessageId) named(step), target);
            case "skipNext" -> lake.skipNext(topic, named(step), target);
            case "pauseSchedule" -> lake.pauseSchedule(topic, named(step), target);
            case "resumeSchedule" -> lake.resumeSchedule(topic, named(step), target);
            case "pause" -> lake.pause(topic, target);
            case "resume" -> lake.resume(topic, target);
            case "get" -> lake.get(topic, (MessageId) named(step));
            case "redrive" -> lake.redrive(topic, letters(step));
            case "pending" -> StreamSupport.stream(lake.pending(topic, filter(step)).spliterator(), false).toList();
            case "schedules" -> StreamSupport.stream(lake.schedules(topic).spliterator(), false).toList();
            default -> throw new IllegalArgumentException("no step " + step);
        };
    }

    private DeadLetterFilter letters(Map<String, Object> step) {
        DeadLetterFilter filter = DeadLetterFilter.subscription((String) step.get("subscription"));
        if (step.containsKey("key")) filter.key((String) step.get("key"));
        if (step.containsKey("reason")) filter.reason((String) step.get("reason"));
        if (step.containsKey("messages")) filter.messages(Json.texts(step.get("messages")).stream().map(messages::get).toList());
        return step.containsKey("dryRun") ? filter.dryRun() : filter;
    }

    private static NewMessage message(Map<String, Object> step, Duration after) {
        NewMessage message = NewMessage.text((String) step.get("payload"));
        if (step.containsKey("afterMillis")) message.after(after);
        if (step.containsKey("requestId")) message.requestId("java-" + step.get("requestId"));
        if (step.containsKey("key")) message.key((String) step.get("key"));
        if (step.containsKey("properties")) message.properties(Json.properties(step.get("properties")));
        if (step.containsKey("expireAfterMillis")) message.expireAfter(Duration.ofMillis((Long) step.get("expireAfterMillis")));
        if (step.containsKey("expireAt")) message.expireAt(Instant.ofEpochMilli((Long) step.get("expireAt")));
        if (step.containsKey("scheduleKey")) message.scheduleKey((String) step.get("scheduleKey"));
        if (step.containsKey("repeat")) message.repeat((String) step.get("repeat")).timeZone((String) step.get("timeZone"));
        return message;
    }

    private Named named(Map<String, Object> step) {
        if (step.containsKey("scheduleKey")) return Named.key((String) step.get("scheduleKey"));
        String name = (String) step.get("message");
        MessageId id = messages.containsKey(name) ? messages.get(name) : Named.id(name);
        return step.containsKey("dueInMillis") ? id.at(Instant.now().plusMillis((Long) step.get("dueInMillis"))) : id;
    }

    private static PendingFilter filter(Map<String, Object> step) {
        PendingFilter filter = PendingFilter.all();
        if (step.containsKey("subscription")) filter.subscription((String) step.get("subscription"));
        if (step.containsKey("key")) filter.key((String) step.get("key"));
        if (step.containsKey("properties")) Json.properties(step.get("properties")).forEach(filter::property);
        if (step.containsKey("limit")) filter.limit((Long) step.get("limit"));
        return filter;
    }
}
