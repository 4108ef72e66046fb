import { fork } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";

export interface Delay {
  /** The same address, by way of the delay. */
  url(original: string): string;
  /** How often, so far, a client spoke after it had heard the server. */
  readonly roundTrips: () => Promise<number>;
  close(): Promise<void>;
}

/** Puts a distance between us and a server on this machine: half of the round trip on the way there, half back. */
export async function startDelay(port: number, roundTripMs: number): Promise<Delay> {
  const file = fileURLToPath(new URL("./delay-process.ts", import.meta.url));
  const child = fork(file, [String(port), String(roundTripMs / 2)]);
  const answer = async (): Promise<Record<string, number>> => {
    const [message]: Record<string, number>[] = await once(child, "message");
    return message ?? {};
  };
  const { port: own } = await answer();
  return {
    url(original) {
      const url = new URL(original);
      url.port = String(own);
      return url.href;
    },
    async roundTrips() {
      const answered = answer();
      child.send("count");
      return (await answered)["roundTrips"] ?? 0;
    },
    async close() {
      const exited = once(child, "exit");
      child.disconnect();
      await exited;
    },
  };
}
