import { uploads } from "../../docs/reader.ts";
import { userId } from "../../docs/reader.ts";
await uploads.consumed(userId, 1);
export {};
