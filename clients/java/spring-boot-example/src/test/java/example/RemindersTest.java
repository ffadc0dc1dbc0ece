package example;

import static org.springframework.test.web.servlet.request.MockMvcRequestBuilders.delete;
import static org.springframework.test.web.servlet.request.MockMvcRequestBuilders.post;
import static org.springframework.test.web.servlet.request.MockMvcRequestBuilders.put;
import static org.springframework.test.web.servlet.result.MockMvcResultMatchers.status;

import java.time.Instant;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.springframework.beans.factory.annotation.Autowired;
import org.springframework.boot.test.context.SpringBootTest;
import org.springframework.boot.webmvc.test.autoconfigure.AutoConfigureMockMvc;
import org.springframework.test.web.servlet.MockMvc;

/** The application on a running service. */
@SpringBootTest
@AutoConfigureMockMvc
@EnabledIfEnvironmentVariable(named = "DELAYLAKE_URL", matches = ".+", disabledReason = "names no service")
class RemindersTest {
    @Autowired
    private MockMvc http;

    private String remind(String in) throws Exception {
        String made = http.perform(post("/reminders").param("who", "zoe").param("text", "call mother").param("in", in))
            .andExpect(status().isCreated()).andReturn().getResponse().getContentAsString();
        Matcher id = Pattern.compile("\"id\":\"([0-9:-]+)\"").matcher(made);
        if (!id.find()) throw new AssertionError(made);
        return id.group(1);
    }

    @Test
    void aReminderIsMovedAndCancelledUntilItIsTooLate() throws Exception {
        String later = Instant.now().plusSeconds(7_200).toString();
        String forgotten = remind("PT1H");
        http.perform(put("/reminders/" + forgotten).param("at", later)).andExpect(status().isOk());
        http.perform(delete("/reminders/" + forgotten).param("at", later)).andExpect(status().isNoContent());
        String sent = remind("PT1H");
        http.perform(put("/reminders/" + sent).param("at", Instant.now().toString())).andExpect(status().isOk());
        http.perform(delete("/reminders/" + sent).param("at", later)).andExpect(status().isConflict());
        http.perform(put("/reminders/999999:0").param("at", later)).andExpect(status().isNotFound());
    }
}
