import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;

/** What Pulsar's own admin client is answered: a line for each index. Arguments: how many indexes, these, then any number of URLs and topics. */
public class MessageIds {
    public static void main(String[] arguments) throws Exception {
        int n = Integer.parseInt(arguments[0]);
        for (int asked = n + 1; asked < arguments.length; asked += 2) {
            try (PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(arguments[asked]).build()) {
                for (int i = 1; i <= n; i++) {
                    long index = Long.parseLong(arguments[i]);
                    try {
                        System.out.println(admin.topics().getMessageIdByIndex(arguments[asked + 1], index));
                    } catch (PulsarAdminException error) {
                        System.out.println(error.getClass().getSimpleName() + " " + error.getStatusCode());
                    }
                }
            }
        }
    }
}
