/** One instance of the service. */
import { once } from "node:events";
import { connect } from "../database.ts";
import { type When, reports } from "./index.ts";

const database = connect(process.env["DATABASE_URL"] ?? "");
process.send?.("up");
const [when] = (await once(process, "message")) as [When];

const nightly = reports(database, when, async (night, signal, attempt) => {
  process.send?.("begun");
  // The first one takes so long that it is killed meanwhile.
  const ms = attempt === 1 ? 60_000 : 10;
  await new Promise<void>((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()));
  });
  return `All orders until ${night.toISOString()}`;
});
await nightly.start();

// Shuts down when it is told to, or when whoever started it is gone.
await Promise.race([once(process, "SIGTERM"), once(process, "disconnect")]);
await nightly.stop({ grace: 1000 });
await database[Symbol.asyncDispose]();
process.disconnect?.();
