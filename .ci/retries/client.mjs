// Creates a user for each line of standard input, with undici.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";

const { Agent, RetryAgent, request } = createRequire(new URL("../npm/", import.meta.url))("undici");
// By itself it repeats what is idempotent by its method alone.
const dispatcher = new RetryAgent(new Agent(), { methods: ["POST"], maxRetries: 3, minTimeout: 10 });

for await (const line of createInterface({ input: process.stdin })) {
  const [key, body] = line.split(" ");
  const headers = key === "-" ? {} : { "Idempotency-Key": key };
  try {
    const answer = await request(process.argv[2], { method: "POST", headers, body, dispatcher });
    await answer.body.dump();
    console.log(answer.statusCode);
  } catch {
    console.log(0);
  }
}
