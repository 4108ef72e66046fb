import type { Connection } from "../seam/database.ts";
import type { Instance } from "./instance.ts";
import { withConnection } from "./one-shot.ts";

/** How long an error may wait for it. */
const tellMs = 1000;

/** Who is in the way, or which rights are: told if it can be found out quickly, never at the cost of the error itself. */
export async function askedQuickly<Native, C extends Connection, T>(
  context: Instance<Native, C>,
  ask: (connection: C) => Promise<readonly T[]>,
  connection?: C,
): Promise<readonly T[]> {
  // With one connection the holder is somebody in this process, and the question would wait for it.
  if (context.database.traits.single) return [];
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<readonly T[]>((resolve) => {
    timer = setTimeout(() => resolve([]), tellMs);
  });
  try {
    const found = (connection ? ask(connection) : withConnection(context, ask)).catch(() => []);
    return await Promise.race([found, late]);
  } finally {
    clearTimeout(timer);
  }
}
