package example;

import delaylake.Client;
import delaylake.DelayLakeException;
import delaylake.MessageId;
import delaylake.NewMessage;
import delaylake.PendingFilter;
import delaylake.Target;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.context.annotation.Bean;
import org.springframework.http.HttpStatus;
import org.springframework.web.bind.annotation.DeleteMapping;
import org.springframework.web.bind.annotation.ExceptionHandler;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.PathVariable;
import org.springframework.web.bind.annotation.PostMapping;
import org.springframework.web.bind.annotation.PutMapping;
import org.springframework.web.bind.annotation.RequestParam;
import org.springframework.web.bind.annotation.ResponseStatus;
import org.springframework.web.bind.annotation.RestController;

/** Reminders that can be moved and cancelled until they are due; a consumer of the destination topic sends them. */
@SpringBootApplication
public class Reminders {
    public static void main(String[] arguments) {
        SpringApplication.run(Reminders.class, arguments);
    }

    /** Settings as {@code --delaylake.url=} or {@code DELAYLAKE_URL}. */
    @Bean
    Client lake(@Value("${delaylake.url:http://127.0.0.1:8081}") String url, @Value("${delaylake.token:}") String token) {
        Client lake = Client.of(url);
        return token.isEmpty() ? lake : lake.withToken(token);
    }

    /** Who got a reminder names it by its id and time. */
    record Reminder(String id, Instant at) {
        MessageId message() {
            return MessageId.parse(id).at(at);
        }
    }

    @RestController
    static class Api {
        private final Client lake;
        private final String topic;

        Api(Client lake, @Value("${delaylake.topic:orders}") String topic) {
            this.lake = lake;
            this.topic = topic;
        }

        @PostMapping("/reminders")
        @ResponseStatus(HttpStatus.CREATED)
        Reminder remind(@RequestParam String who, @RequestParam String text, @RequestParam Duration in) {
            MessageId message = lake.schedule(topic, NewMessage.text(text).key(who).after(in));
            return new Reminder(message.toString(), message.deliverAt());
        }

        @GetMapping("/reminders")
        List<Reminder> waiting(@RequestParam String who) {
            List<Reminder> found = new ArrayList<>();
            lake.pending(topic, PendingFilter.all().key(who).limit(100))
                .forEach(one -> found.add(new Reminder(one.id().toString(), one.deliverAt())));
            return found;
        }

        @PutMapping("/reminders/{id}")
        Reminder snooze(@PathVariable String id, @RequestParam Instant at) {
            lake.reschedule(topic, MessageId.parse(id), at, Target.ALL);
            return new Reminder(id, at);
        }

        @DeleteMapping("/reminders/{id}")
        @ResponseStatus(HttpStatus.NO_CONTENT)
        void forget(@PathVariable String id, @RequestParam Instant at) {
            lake.cancel(topic, new Reminder(id, at).message());
        }

        @ExceptionHandler(DelayLakeException.TooLate.class)
        @ResponseStatus(HttpStatus.CONFLICT)
        void tooLate() {}

        @ExceptionHandler(DelayLakeException.NotFound.class)
        @ResponseStatus(HttpStatus.NOT_FOUND)
        void notFound() {}
    }
}
