import { key } from "../../seam/key.ts";
import { assert, during, suite, where } from "./support.ts";

export const inspectCases = suite("inspect", {
  "tells who holds a lock, who waits for it, and for whom": where(
    ({ capabilities }) => capabilities.inspect,
    async ({ hf, other, fresh, capabilities }) => {
      const lock = key("seen", fresh);
      if (capabilities.connections === "one" || capabilities.granularity === "database") {
        // Whoever could be seen is inside of this process; the answer must still be one.
        assert.ok(Array.isArray((await hf.inspect()).waiters));
        return;
      }
      let waiting: Promise<unknown> | undefined;
      await during(
        (inside) => other.transaction({ lock }, inside),
        async () => {
          waiting = other.transaction({ lock, wait: 60_000 }, async () => {});
          for (let i = 0; ; i++) {
            const { holders, waiters, chains } = await hf.inspect();
            const blocked = waiters.filter(({ blockedBy }) => blockedBy.length > 0);
            const chain = chains.find(({ waiters: behind }) =>
              behind.some(({ session }) => blocked.some((wait) => wait.session.id === session.id)),
            );
            if (blocked.length > 0 && chain) {
              assert.ok(holders.length + waiters.length > 0);
              assert.ok(chain.holds.length > 0);
              assert.ok(blocked.every(({ granted, blockedBy }) => !granted && !blockedBy.includes("")));
              break;
            }
            assert.ok(i < 200, "the wait was never seen");
            await new Promise((resolve) => setTimeout(resolve, 150));
          }
        },
      );
      await waiting;
    },
    ({ hf }) => hf.inspect(),
  ),
});
