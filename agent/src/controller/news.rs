//! What a watch of the controller brings: complete lists, then changes.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::apiserver::object::{Body, Object};
use crate::apiserver::reflect::{self, Collection, LastHeard, Reflector};
use crate::apiserver::{ApiServer, Failure};
use crate::clock::Clock;
use crate::loops::Counter;

/// What a watch brings.
#[derive(Clone, Debug)]
pub enum News<B> {
    /// All there is: whatever is not in it is gone.
    All(Vec<Object<B>>),
    /// An object was created or changed.
    Changed(Box<Object<B>>),
    /// An object is gone; this was its last state.
    Gone(Box<Object<B>>),
    /// The server has been heard of. Everything above says so, too.
    Alive,
    /// It cannot be watched. What was known stays known: that nothing comes is no news.
    Failing(Failure),
}

/// Follows a collection until nobody listens. `wrap` makes the listener's own kind of news. Safe to cancel.
pub async fn follow<B: Body, M: Send>(
    api: ApiServer,
    collection: Collection,
    clock: Arc<dyn Clock>,
    out: mpsc::Sender<M>,
    wrap: fn(News<B>) -> M,
) {
    let mut parts = Parts(Vec::new());
    let reflector = Reflector {
        api,
        collection,
        read: Box::new(Object::read),
        wrap: move |news| parts.take(news).map(wrap),
        out,
        heard: Arc::new(LastHeard::default()),
        clock,
        rounds: Arc::new(Counter::default()),
    };
    reflector.run().await;
}

/// The parts of a list that has begun.
struct Parts<B>(Vec<Object<B>>);

impl<B> Parts<B> {
    fn take(&mut self, news: reflect::News<Object<B>>) -> Option<News<B>> {
        match news {
            reflect::News::Began => {
                self.0.clear();
                None
            }
            reflect::News::Part(objects, unknown) => {
                self.0.extend(objects);
                unknown.iter().for_each(|why| unreadable(why));
                Some(News::Alive)
            }
            reflect::News::Listed => Some(News::All(std::mem::take(&mut self.0))),
            reflect::News::Shown(object) => Some(News::Changed(object)),
            reflect::News::Deleted(object) => Some(News::Gone(object)),
            reflect::News::Unknown(why) => {
                unreadable(&why);
                None
            }
            reflect::News::Alive | reflect::News::Going => Some(News::Alive),
            reflect::News::Failing(failure) => Some(News::Failing(failure)),
        }
    }
}

/// An API server has no objects without a name: so this is of no use beyond a line.
fn unreadable(why: &str) {
    tracing::warn!(why, "an object cannot be told from others; it is left out");
}
