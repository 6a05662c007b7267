import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.openapitools.client.ApiClient;
import org.openapitools.client.ApiException;
import org.openapitools.client.api.OpenaiApi;
import org.openapitools.client.api.StateApi;
import org.openapitools.client.api.WorkApi;
import org.openapitools.client.model.BatchDefaults;
import org.openapitools.client.model.BatchRequest;
import org.openapitools.client.model.BatchResponse;
import org.openapitools.client.model.BatchRow;
import org.openapitools.client.model.ChatCompletionRequest;
import org.openapitools.client.model.ChatMessage;
import org.openapitools.client.model.Completion;
import org.openapitools.client.model.CompletionChoice;
import org.openapitools.client.model.CompletionRequest;
import org.openapitools.client.model.ErrorBody;
import org.openapitools.client.model.ErrorObject;
import org.openapitools.client.model.GenerateRequest;
import org.openapitools.client.model.GenerateResponse;
import org.openapitools.client.model.Info;
import org.openapitools.client.model.Timings;

/** Drives a running service through the generated client and prints what it saw as JSON: java Drive URL KEY. */
public class Drive {
    public static void main(String[] arguments) throws Exception {
        ApiClient client = client(arguments[0], arguments[1]);
        WorkApi work = new WorkApi(client);
        StateApi state = new StateApi(client);
        Info info = state.info();
        GenerateResponse prompt = work.generate(new GenerateRequest().prompt("hello ").maxTokens(9));
        List<ChatMessage> messages = List.of(new ChatMessage().role("user").content("abc"));
        GenerateResponse chat = work.generate(new GenerateRequest().messages(messages).maxTokens(21));
        BatchResponse batch = work.batch(batch());

        Map<String, Object> report = new LinkedHashMap<>();
        report.put("livez", state.livez().getStatus());
        report.put("readyz", state.readyz().getStatus());
        report.put("info", Map.of(
            "kind", info.getBackend().getKind(), "max_model_len", info.getLimits().getMaxModelLen()));
        report.put("prompt", prompt.getOutputs().get(0).getText());
        report.put("messages", chat.getOutputs().get(0).getText());
        report.put("e2e_ms", prompt.getTimings().getE2eMs());
        report.put("rows", rows(batch));
        report.put("counts", batch.getCounts());
        report.put("error", refused(client, () -> work.generate(
            new GenerateRequest().prompt("x").temperature(java.math.BigDecimal.valueOf(-1)))));
        StateApi stranger = new StateApi(client(arguments[0], "wrong"));
        report.put("wrong_key", refused(client, stranger::info));
        report.put("openai", openai(client, new OpenaiApi(client)));
        System.out.println(client.getObjectMapper().writer().writeValueAsString(report));
    }

    static Map<String, Object> openai(ApiClient client, OpenaiApi api) throws Exception {
        String model = api.models().getData().get(0).getId();
        Completion list = completed(api, List.of("one", "two"), 3);
        Timings times = list.getMetrics().getTimings();
        Map<String, Object> report = new LinkedHashMap<>();
        report.put("models", List.of(model));
        report.put("model", api.model(model).getId());
        report.put("texts", Map.of(
            "text", texts(completed(api, "hi", 2)),
            "list", texts(list),
            "ids", texts(completed(api, List.of(97, 98), 2)),
            "lists_of_ids", texts(completed(api, List.of(List.of(97, 98), List.of(99, 100)), 2))));
        report.put("chats", List.of(said(api, "abc"), said(api, List.of(Map.of("type", "text", "text", "abc")))));
        report.put("e2e_ms", times.getE2eMs());
        report.put("sum_ms", times.getResolveMs().add(times.getWindowWaitMs()).add(times.getSubmitMs())
            .add(times.getEngineQueueMs()).add(times.getPrefillMs()).add(times.getDecodeMs())
            .add(times.getWindowTailMs()));
        report.put("requests", list.getMetrics().getRequests().size());
        CompletionRequest wrong = new CompletionRequest().prompt("x").echo(true).topK(-2);
        report.put("error", refused(client, () -> api.completions(wrong)));
        return report;
    }

    /** A prompt may be a text, a list of texts, token ids, or a list of lists of token ids. */
    static Completion completed(OpenaiApi api, Object prompt, int maxTokens) throws ApiException {
        return api.completions(new CompletionRequest().prompt(prompt).maxTokens(maxTokens));
    }

    static List<String> texts(Completion answer) {
        return answer.getChoices().stream().map(CompletionChoice::getText).toList();
    }

    static String said(OpenaiApi api, Object content) throws ApiException {
        List<ChatMessage> messages = List.of(new ChatMessage().role("user").content(content));
        return api.chatCompletions(new ChatCompletionRequest().messages(messages).maxCompletionTokens(21))
            .getChoices().get(0).getMessage().getContent();
    }

    /** The key goes into a header: this library of the generator knows no other way. */
    static ApiClient client(String url, String key) {
        ApiClient client = new ApiClient();
        client.updateBaseUri(url);
        client.setRequestInterceptor(request -> request.setHeader("Authorization", "Bearer " + key));
        return client;
    }

    static BatchRequest batch() {
        List<GenerateRequest> requests = List.of(
            new GenerateRequest().prompt("one"),
            new GenerateRequest().prompt("x").topP(java.math.BigDecimal.valueOf(7)),
            new GenerateRequest().prompt("BOOM"),
            new GenerateRequest().prompt("two"));
        return new BatchRequest().requests(requests).defaults(new BatchDefaults().maxTokens(3));
    }

    static List<Map<String, Object>> rows(BatchResponse batch) {
        List<Map<String, Object>> rows = new ArrayList<>();
        for (BatchRow row : batch.getResults()) {
            rows.add(row.getError() != null
                ? seen(row.getStatus(), row.getError())
                : Map.of("status", row.getStatus(), "text", row.getResponse().getOutputs().get(0).getText()));
        }
        return rows;
    }

    interface Call {
        Object make() throws ApiException;
    }

    static Map<String, Object> refused(ApiClient client, Call call) throws Exception {
        try {
            throw new AssertionError("it was not refused: " + call.make());
        } catch (ApiException error) {
            ErrorBody body = client.getObjectMapper().readValue(error.getResponseBody(), ErrorBody.class);
            return seen((long) error.getCode(), body.getError());
        }
    }

    static Map<String, Object> seen(long status, ErrorObject error) {
        Map<String, Object> seen = new LinkedHashMap<>();
        seen.put("status", status);
        seen.put("code", error.getCode());
        seen.put("param", error.getParam());
        return seen;
    }
}
