import type { Connection } from "../seam/database.ts";
import type { Holder } from "../seam/errors.ts";
import type { Instance } from "./instance.ts";
import { withConnection } from "./one-shot.ts";

/** How long an error may wait for it. */
const tellMs = 1000;

/** Who is in the way: told if it can be found out quickly, never at the cost of the error itself. */
export async function holdersBy<Native, C extends Connection>(
  context: Instance<Native, C>,
  ask: (connection: C) => Promise<readonly Holder[]>,
  connection?: C,
): Promise<readonly Holder[]> {
  // With one connection the holder is somebody in this process, and the question would wait for it.
  if (context.database.traits.single) return [];
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<readonly Holder[]>((resolve) => {
    timer = setTimeout(() => resolve([]), tellMs);
  });
  try {
    const found = (connection ? ask(connection) : withConnection(context, ask)).catch(() => []);
    return await Promise.race([found, late]);
  } finally {
    clearTimeout(timer);
  }
}
