import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;

/** What Pulsar's own admin client is answered: a line for each index. Arguments: URL, topic, indexes. */
public class MessageIds {
    public static void main(String[] arguments) throws Exception {
        try (PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(arguments[0]).build()) {
            for (int i = 2; i < arguments.length; i++) {
                try {
                    System.out.println(admin.topics().getMessageIdByIndex(arguments[1], Long.parseLong(arguments[i])));
                } catch (PulsarAdminException error) {
                    System.out.println(error.getClass().getSimpleName() + " " + error.getStatusCode());
                }
            }
        }
    }
}
