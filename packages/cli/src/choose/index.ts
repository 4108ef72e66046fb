export { type Answer, type Asked, choose } from "./choose.ts";
export {
  type Choice,
  type Database,
  type Long,
  type Question,
  type What,
  databases,
  longs,
  questions,
  whats,
} from "./questions.ts";
